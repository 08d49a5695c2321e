/** What the server does by itself with feedback, looked at every few seconds while a page shows it. */
import { endTrial, learning, setPaused } from "../api/feedback";
import type { LearnAnswer } from "../api/types";
import { server } from "./server.svelte";

const EVERY_MS = 3000;

export class LearningFeed {
  known = $state.raw<LearnAnswer | null>(null);
  busy = $state(false);
  error = $state<unknown>(null);
  private timer = setInterval(() => this.look(), EVERY_MS);

  constructor() {
    this.look();
  }

  close(): void {
    clearInterval(this.timer);
  }

  /** Make no more jobs by itself, or make them again. */
  pause(paused: boolean): Promise<void> {
    return this.act(setPaused(paused));
  }

  /** End the trial: the version goes live, or it does not. */
  end(promoted: boolean): Promise<void> {
    return this.act(endTrial(promoted));
  }

  private look(): void {
    if (server.link === "live" && !this.busy) learning().then((found) => (this.known = found), () => undefined); // the next look may succeed
  }

  private async act(what: Promise<LearnAnswer>): Promise<void> {
    this.busy = true;
    this.error = null;
    try {
      this.known = await what;
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = false;
    }
  }
}
