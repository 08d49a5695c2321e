/** What the server does by itself with feedback, looked at again and again while a page shows it. */
import { endTrial, learning, setPaused } from "../api/feedback";
import type { LearnAnswer } from "../api/types";
import { server } from "./server.svelte";

const EVERY_MS = 3000;

class Learning {
  known = $state.raw<LearnAnswer | null>(null);
  busy = $state(false);
  error = $state<unknown>(null);

  /** Look until the function that is returned is called. */
  follow(): () => void {
    const look = (): void => {
      if (server.link === "live" && !this.busy) learning().then((found) => (this.known = found), () => undefined); // the next look may succeed
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

  private async act(what: () => Promise<LearnAnswer>): Promise<void> {
    this.busy = true;
    this.error = null;
    try {
      this.known = await what();
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = false;
    }
  }
}

export const learn = new Learning();
