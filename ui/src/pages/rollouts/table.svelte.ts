/** The rows that were read so far, a page at a time, as far as somebody scrolled; new ones come on top while one follows. */
import type { Filter, RolloutSource } from "../../api/rollouts";
import type { RolloutRow } from "../../api/types";

const PAGE = 1000;
const EMPTY_PAGES = 10; // of a search that are read before one is asked whether to go on

export class Table {
  rows = $state.raw<RolloutRow[]>([]);
  /** All there is has been read. */
  whole = $state(false);
  busy = $state(false);
  /** A long search found nothing for so long that it waits to be told to go on. */
  paused = $state(false);
  error = $state<unknown>(null);

  private after: number | null = null;
  private newest: number | null = null;

  constructor(
    readonly source: RolloutSource,
    readonly filter: Filter,
  ) {
    void this.more();
  }

  async more(): Promise<void> {
    if (this.busy || this.whole || this.error) return;
    this.busy = true;
    this.paused = false;
    try {
      for (let pages = 0; pages < EMPTY_PAGES; pages += 1) {
        const page = await this.source.page(this.filter, this.after, PAGE);
        this.newest ??= page.newest ?? null;
        this.rows = this.rows.concat(page.rows);
        this.after = page.next;
        this.whole = page.next === null;
        if (page.rows.length || this.whole) return;
      }
      this.paused = true;
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = false;
    }
  }

  /** What came since, on top. */
  async tail(): Promise<void> {
    if (!this.source.since || this.newest === null || this.busy) return;
    try {
      const page = await this.source.since(this.filter, this.newest);
      this.newest = page.newest ?? this.newest;
      if (page.rows.length) this.rows = page.rows.concat(this.rows);
    } catch {
      return; // the next one may come through; that there is no connection is said elsewhere
    }
  }
}
