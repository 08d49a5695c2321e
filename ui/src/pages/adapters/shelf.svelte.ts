/** Every version with where it came from, read again whenever the list of adapters changes. */
import { get, segment } from "../../api/http";
import type { AdapterDetail, AdapterList, AdapterSummary, AdapterVersion } from "../../api/types";

class Shelf {
  versions = $state.raw<AdapterVersion[]>([]);
  error = $state<unknown>(null);
  read = $state(false);

  private turn = 0;
  /** What was read of each adapter, and the summary that it was read for. */
  private known = new Map<string, { summary: string; history: AdapterVersion[] }>();

  async load(list: AdapterList | null): Promise<void> {
    if (!list) return;
    const turn = (this.turn += 1);
    try {
      const known = new Map(await Promise.all(list.available.map((each) => this.entry(each))));
      if (turn !== this.turn) return; // a newer list came meanwhile
      this.known = known;
      this.versions = [...known.values()].flatMap((each) => each.history);
      this.read = true;
      this.error = null;
    } catch (problem) {
      this.error = problem;
    }
  }

  /** An adapter with its versions, read only if its summary is another one than before. */
  private async entry(of: AdapterSummary): Promise<[string, { summary: string; history: AdapterVersion[] }]> {
    const summary = JSON.stringify(of);
    const before = this.known.get(of.name);
    if (before?.summary === summary) return [of.name, before];
    const { history } = await get<AdapterDetail>(`v1/adapters/${segment(of.name)}`);
    return [of.name, { summary, history }];
  }
}

export const shelf = new Shelf();
