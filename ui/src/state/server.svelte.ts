/** The one store of what the server is doing, kept current by its stream of events. */
import { ApiError, get, request } from "../api/http";
import { saved } from "../api/saved";
import { DEAD_MS, events } from "../api/sse";
import type { AdapterList, ConfigAnswer, DecodeStats, Health, RecentRequest, RunList, RunSummary, TrainStatus } from "../api/types";
import { settings } from "./settings.svelte";

const RETRY_MS = [500, 1000, 2000, 4000];
const SPEEDS = 120;
const JOBS_AT_ONCE = 1024; // the most that the server tells at once
const STALE_S = 7; // the server says something every 3 s

type Connection = "connecting" | "live" | "lost" | "loading" | "locked" | "saved";
export type Link = Connection | "stale";

class ServerState {
  private connection = $state<Connection>("connecting");
  private heardAt = $state(Date.now());
  /** The time, to the second. */
  now = $state(Date.now());
  /** For how many seconds the server has said nothing, not even that it lives. */
  silence = $derived(Math.max(0, Math.round((this.now - this.heardAt) / 1000)));
  link = $derived<Link>(this.silence >= STALE_S && ["connecting", "live"].includes(this.connection) ? "stale" : this.connection);
  /** Who answers: `groupwise serve`, or `groupwise ui` over runs on disk, or a report; null until the first event. */
  kind = $state<"server" | "runs" | null>(null);
  /** The runs of `groupwise ui`, and of the run that `groupwise serve RUN` was given. */
  runs = $state.raw<RunSummary[]>([]);
  /** The version of the run that the server beside these pages began with; null where no model is served here. */
  served = $state<string | null>(null);
  health = $state.raw<Health | null>(null);
  decode = $state.raw<DecodeStats | null>(null);
  requests = $state.raw<RecentRequest[]>([]);
  adapters = $state.raw<AdapterList | null>(null);
  config = $state.raw<ConfigAnswer | null>(null);
  /** The running job, those that wait by their turn, those that ended, newest first. */
  jobs = $state.raw<TrainStatus[]>([]);
  /** Whether the list of jobs has come. */
  knowsJobs = $state(false);
  /** Whether those are all there are: the oldest are read when somebody scrolls to them. */
  hasAllJobs = $state(false);
  /** Tokens a second, as they were told, oldest first. */
  speeds = $state.raw<number[]>([]);

  running = $derived(this.jobs.find((job) => job.state === "running") ?? null);
  queued = $derived(this.jobs.filter((job) => job.state === "queued"));
  active = $derived(this.adapters?.active_version ?? this.health?.active_version ?? "base");
  /** What a request may name, newest versions first. */
  versions = $derived(["base", ...(this.adapters?.available ?? []).flatMap((each) => each.versions.toReversed())]);

  private reading = false;
  private wake: () => void = () => undefined;

  run(id: string): RunSummary | null {
    return this.runs.find((run) => run.run === id) ?? null;
  }

  job(id: string): TrainStatus | null {
    return this.jobs.find((job) => job.job_id === id) ?? null;
  }

  /** Follow the server for as long as the page is open; of a report all is known. */
  async stay(): Promise<void> {
    if (saved) {
      this.kind = "runs";
      this.runs = saved.runs.map((run) => run.detail);
      this.connection = "saved";
      return;
    }
    setInterval(() => (this.now = Date.now()), 1000);
    for (let failures = 0; ; failures += 1) {
      try {
        await this.follow(() => (failures = 0));
        this.connection = "lost";
      } catch (error) {
        if (this.link !== "stale" || error instanceof ApiError) this.connection = linkAfter(error);
      }
      await this.pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)] ?? 1000);
    }
  }

  /** Try again now: there is a key. */
  retry(): void {
    this.wake();
  }

  private async follow(came: () => void): Promise<void> {
    const response = await request("v1/events");
    let first = true;
    this.heard();
    for await (const { event, data } of events(response, { heard: () => this.heard(), silentMs: DEAD_MS })) {
      came();
      this.meet(event === "runs" ? "runs" : "server");
      if (event === "jobs") {
        const jobs = JSON.parse(data) as TrainStatus[];
        if (first) this.hasAllJobs = jobs.length < JOBS_AT_ONCE;
        this.merge(jobs, first);
        first = false;
      } else this.hear(event, JSON.parse(data));
    }
  }

  private heard(): void {
    this.heardAt = Date.now();
    this.connection = "live";
  }

  private meet(kind: "server" | "runs"): void {
    if (this.kind === kind) return;
    this.kind = kind;
    if (kind === "server") get<ConfigAnswer>("v1/config").then((config) => (this.config = config), () => undefined);
  }

  private hear(event: string, data: unknown): void {
    if (event === "runs") ({ runs: this.runs, served: this.served } = data as RunList);
    else if (event === "health") this.health = data as Health;
    else if (event === "requests") this.requests = data as RecentRequest[];
    else if (event === "adapters") this.adapters = data as AdapterList;
    else if (event === "decode") {
      this.decode = data as DecodeStats;
      this.speeds = [...this.speeds, this.decode.tok_per_sec].slice(-SPEEDS);
    }
  }

  /** Read jobs that are older than all that are known. */
  async readOlder(): Promise<void> {
    const oldest = this.jobs.findLast((job) => job.finished_at !== null);
    if (this.reading || this.hasAllJobs || !oldest) return;
    this.reading = true;
    try {
      const older = await get<TrainStatus[]>("v1/train/status", { before: oldest.job_id, limit: JOBS_AT_ONCE });
      this.merge(older);
      this.hasAllJobs = older.length < JOBS_AT_ONCE;
    } catch {
      this.hasAllJobs = true; // it was forgotten just now, and so is all that is older; or there is no connection, which is said
    } finally {
      this.reading = false;
    }
  }

  /** A job that was just submitted or changed, before the stream says so. */
  merge(changed: TrainStatus[], replace = false): void {
    const jobs = new Map(replace ? [] : this.jobs.map((job) => [job.job_id, job]));
    for (const job of changed) jobs.set(job.job_id, job);
    this.jobs = [...jobs.values()].sort(byTurn);
    this.knowsJobs = true;
  }

  private pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      this.wake = resolve;
      if (!settings.locked) setTimeout(resolve, ms);
    });
  }
}

function linkAfter(error: unknown): Connection {
  if (error instanceof ApiError && error.status === 401) return "locked";
  return error instanceof ApiError && error.code === "not_ready" ? "loading" : "lost";
}

const RANK = { running: 0, queued: 1, completed: 2, failed: 2, cancelled: 2 };

function byTurn(a: TrainStatus, b: TrainStatus): number {
  const rank = RANK[a.state] - RANK[b.state];
  if (rank) return rank;
  if (a.position !== null && b.position !== null) return a.position - b.position;
  return b.created_at.localeCompare(a.created_at);
}

export const server = new ServerState();
