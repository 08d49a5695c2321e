/** Where one is: `#/jobs/abc?tab=x` is page "jobs", rest ["abc"] and query tab=x. Links hold the whole view. */
class Route {
  page = $state("now");
  rest = $state<string[]>([]);
  query = $state.raw(new URLSearchParams());

  constructor() {
    this.read();
    window.addEventListener("hashchange", () => this.read());
  }

  private read(): void {
    const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const [page = "", ...rest] = path.split("/").filter(Boolean).map(decoded);
    this.page = page || "now";
    this.rest = rest;
    this.query = new URLSearchParams(query);
  }

  go(hash: string): void {
    location.hash = hash;
  }

  /** Change the query and leave no entry in the history. */
  ask(values: Record<string, string | null>): void {
    this.write(values, (hash) => history.replaceState(history.state, "", hash));
  }

  /** Open a part of the page that is not open, so that Back closes it; one that is open is exchanged. */
  open(name: string, value: string): void {
    if (this.query.has(name)) this.ask({ [name]: value });
    else this.write({ [name]: value }, (hash) => history.pushState({ opened: name }, "", hash));
  }

  /** Close what `open` opened, as Back does. */
  close(name: string): void {
    if ((history.state as { opened?: string } | null)?.opened === name) history.back();
    else this.ask({ [name]: null });
  }

  private write(values: Record<string, string | null>, put: (hash: string) => void): void {
    const query = new URLSearchParams(this.query);
    for (const [name, value] of Object.entries(values)) {
      if (value) query.set(name, value);
      else query.delete(name);
    }
    const path = [this.page, ...this.rest].map(encodeURIComponent).join("/");
    put(`#/${path}${query.size ? `?${query}` : ""}`);
    this.query = query;
  }
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = new Route();
