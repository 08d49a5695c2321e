/** Every version with where it came from, read again whenever the list of adapters changes. */
import { get, segment } from "../../api/http";
import type { AdapterDetail, AdapterList, AdapterVersion } from "../../api/types";

class Shelf {
  versions = $state.raw<AdapterVersion[]>([]);
  error = $state<unknown>(null);
  read = $state(false);

  private turn = 0;

  async load(list: AdapterList | null): Promise<void> {
    if (!list) return;
    const turn = (this.turn += 1);
    try {
      const details = await Promise.all(list.available.map((each) => get<AdapterDetail>(`v1/adapters/${segment(each.name)}`)));
      if (turn !== this.turn) return; // a newer list came meanwhile
      this.versions = details.flatMap((each) => each.history);
      this.read = true;
      this.error = null;
    } catch (problem) {
      this.error = problem;
    }
  }
}

export const shelf = new Shelf();
