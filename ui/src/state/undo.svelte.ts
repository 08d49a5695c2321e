/** What was asked for and can be taken back for some seconds: it is done when they are over, or the page is left. */
const SECONDS = 5;

export interface Pending {
  id: string;
  text: string;
  seconds: number;
}

class Undo {
  pending = $state<Pending[]>([]);
  error = $state<unknown>(null);

  private acts = new Map<string, { act: () => Promise<void>; timer: ReturnType<typeof setInterval> }>();

  constructor() {
    if (typeof window !== "undefined") window.addEventListener("pagehide", () => this.pending.forEach((each) => void this.proceed(each.id)));
  }

  has(id: string): boolean {
    return this.pending.some((each) => each.id === id);
  }

  /** `act` is called in some seconds, unless `take` comes before. Its requests must outlive the page (`keepalive`). */
  soon(id: string, text: string, act: () => Promise<void>): void {
    if (this.has(id)) return;
    this.error = null;
    this.pending.push({ id, text, seconds: SECONDS });
    this.acts.set(id, { act, timer: setInterval(() => this.tick(id), 1000) });
  }

  take(id: string): void {
    this.forget(id);
  }

  private tick(id: string): void {
    const each = this.pending.find((one) => one.id === id);
    if (each && (each.seconds -= 1) <= 0) void this.proceed(id);
  }

  private async proceed(id: string): Promise<void> {
    const act = this.acts.get(id)?.act;
    this.forget(id);
    try {
      await act?.();
    } catch (problem) {
      this.error = problem;
    }
  }

  private forget(id: string): void {
    clearInterval(this.acts.get(id)?.timer);
    this.acts.delete(id);
    this.pending = this.pending.filter((each) => each.id !== id);
  }
}

export const undo = new Undo();
