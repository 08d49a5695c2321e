/** What the server does by itself with feedback, looked at again and again while a page shows it. */
import { endTrial, learnedBefore, learning, setPaused } from "../api/feedback";
import type { LearnAnswer, LearnTransition } from "../api/types";
import { server } from "./server.svelte";

const EVERY_MS = 3000;
const AT_ONCE = 50; // the transitions of one answer

class Learning {
  known = $state.raw<LearnAnswer | null>(null);
  /** What happened, newest first, as far back as it was read. */
  history = $state.raw<LearnTransition[]>([]);
  /** Whether the server keeps older ones. */
  hasOlder = $state(false);
  busy = $state(false);
  error = $state<unknown>(null);

  /** Look until the function that is returned is called. */
  follow(): () => void {
    const look = (): void => {
      if (server.link === "live" && !this.busy) learning().then((found) => this.take(found), () => undefined); // the next look may succeed
    };
    look();
    const timer = setInterval(look, EVERY_MS);
    return () => clearInterval(timer);
  }

  pause(paused: boolean): Promise<void> {
    return this.act(() => setPaused(paused));
  }

  /** End the trial: its version goes live, or it does not. */
  end(promoted: boolean): Promise<void> {
    return this.act(() => endTrial(promoted));
  }

  /** Read what happened before all that is known. */
  older(): Promise<void> {
    return this.during(async () => {
      const page = await learnedBefore(this.history.at(-1)?.seq ?? 0);
      this.history = [...this.history, ...page.transitions];
      this.hasOlder = page.next !== null;
    });
  }

  private take(found: LearnAnswer): void {
    this.known = found;
    const newest = this.history[0]?.seq ?? -1;
    const next = found.transitions.findIndex((each) => each.seq <= newest);
    if (next > 0) this.history = [...found.transitions.slice(0, next), ...this.history];
    if (next >= 0) return;
    this.history = found.transitions; // nothing was known, or not what came just before these
    this.hasOlder = found.transitions.length >= AT_ONCE;
  }

  private act(what: () => Promise<LearnAnswer>): Promise<void> {
    return this.during(async () => this.take(await what()));
  }

  private async during(work: () => Promise<void>): Promise<void> {
    this.busy = true;
    this.error = null;
    try {
      await work();
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = false;
    }
  }
}

export const learn = new Learning();
