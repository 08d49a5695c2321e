/** A job or a run as it happens: its steps and what was said of it, from its stream of events. */
import { get, request, segment } from "../api/http";
import { DEAD_MS, events } from "../api/sse";
import type { RunMetrics, TrainStatus } from "../api/types";
import { server } from "./server.svelte";
import { merged, type Step } from "./steps";

interface Told {
  kind: "state" | "metrics" | "message";
  at: string;
  level: string;
  message: string;
  data: Record<string, unknown>;
}

const RETRY_MS = 1000;

/** Steps that are followed until there are no more of them. */
abstract class Feed {
  steps = $state.raw<Step[]>([]);

  protected last: string | null = null;
  private ended = false;
  protected readonly stop = new AbortController();

  constructor(readonly id: string) {
    void this.follow();
  }

  close(): void {
    this.stop.abort();
  }

  /** It goes on after all. */
  again(): void {
    if (this.ended) void this.follow();
  }

  private async follow(): Promise<void> {
    this.ended = false;
    while (!this.stop.signal.aborted) {
      try {
        if ((this.ended = await this.listen())) return;
      } catch {
        if (this.stop.signal.aborted) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** Whether it has ended, and all of it was heard. */
  protected abstract listen(): Promise<boolean>;
}

export class JobFeed extends Feed {
  log = $state.raw<Told[]>([]);

  protected async listen(): Promise<boolean> {
    const path = `v1/train/events/${segment(this.id)}`;
    const response = await request(path, { query: { after: this.last }, signal: this.stop.signal });
    if (response.status === 204) return true;
    for await (const { id, data } of events(response, { silentMs: DEAD_MS })) {
      this.last = id;
      this.hear(JSON.parse(data) as Told);
    }
    const status = await get<TrainStatus>(`v1/train/status/${segment(this.id)}`, {}, this.stop.signal);
    server.merge([status]);
    return status.state !== "running" && status.state !== "queued";
  }

  private hear(told: Told): void {
    if (told.kind !== "metrics") {
      this.log = [...this.log, told];
      return;
    }
    const step = told.data as Step;
    const before = this.steps.filter((each) => (each.step ?? 0) < (step.step ?? 0)); // a step may be run again
    this.steps = [...before, step];
  }
}

export class RunFeed extends Feed {
  protected async listen(): Promise<boolean> {
    const path = `v1/events/${segment(this.id)}`;
    const response = await request(path, { query: { after: this.last }, signal: this.stop.signal });
    if (response.status === 204) return true;
    for await (const { id, data } of events(response, { silentMs: DEAD_MS })) {
      this.last = id;
      const found = JSON.parse(data) as RunMetrics;
      this.steps = merged(found.anew ? [] : this.steps, found.steps as Step[]);
    }
    return false;
  }
}
