/** The rows that were read so far, a page at a time, as far as somebody scrolled. */
import type { Filter, RolloutSource } from "../../api/rollouts";
import type { RolloutRow } from "../../api/types";

const PAGE = 1000;

export class Table {
  rows = $state.raw<RolloutRow[]>([]);
  /** All there is has been read. */
  whole = $state(false);
  busy = $state(false);
  error = $state<unknown>(null);

  private after: number | null = null;

  constructor(
    readonly source: RolloutSource,
    readonly filter: Filter,
  ) {
    void this.more();
  }

  async more(): Promise<void> {
    if (this.busy || this.whole || this.error) return;
    this.busy = true;
    try {
      let found = 0;
      do {
        const page = await this.source.page(this.filter, this.after, PAGE);
        found = page.rows.length;
        this.rows = this.rows.concat(page.rows);
        this.after = page.next;
        this.whole = page.next === null;
      } while (!found && !this.whole); // a page of a long search may be empty
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = false;
    }
  }
}
