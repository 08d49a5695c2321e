/** Jobs that make versions of one adapter, as rounds: the reward rises from one to the next. */
import type { TrainStatus } from "../../api/types";
import { number, seconds } from "../../state/format";
import type { Outcome } from "../../state/outcome";

export interface Round {
  job: TrainStatus;
  round: number;
  reward: number | null;
  /** The standard error of `reward`; null where the job had one group. */
  error: number | null;
  /** Groups posted, and of those the ones whose rewards are all equal; null of a job that did not count them. */
  groups: number;
  equal: number | null;
}

export function reward(job: TrainStatus): number | null {
  const value = job.summary["reward_mean"] ?? job.metrics["reward/mean"];
  return typeof value === "number" ? value : null;
}

function fact(job: TrainStatus, name: string): number | null {
  const value = job.summary[name];
  return typeof value === "number" ? value : null;
}

/** For how long a job has run, in words; a dash for one that never did. */
export function lasted(job: TrainStatus, now: number): string {
  if (job.started_at === null) return "–";
  const end = job.finished_at === null ? now : Date.parse(job.finished_at);
  return seconds(Math.max(0, end - Date.parse(job.started_at)) / 1000);
}

/** What a job was posted, and what the next round, which its version sampled, was posted. */
export function outcomeOf(job: TrainStatus, jobs: TrainStatus[]): Outcome | null {
  const value = reward(job);
  if (value === null) return null;
  const all = rounds(jobs, job.adapter_name);
  const at = all.findIndex((each) => each.job.job_id === job.job_id);
  const next = at < 0 ? undefined : all[at + 1];
  const previous = at > 0 ? all[at - 1] : undefined;
  const ago = previous?.reward == null ? "" : `The round before it was posted ${number(previous.reward)}. `;
  const ended = job.state === "completed" ? "Sample from its version, score and post: the next round measures what this one taught." : "";
  return {
    title: "Mean reward", metric: "job/reward_mean",
    before: { value, spread: fact(job, "reward_stderr"), what: "posted with this job" },
    after: next?.reward == null ? null : { value: next.reward, spread: next.error, what: "posted in the next round" },
    note: next?.reward == null ? ago + ended : "Before is what was sampled for this job; after is what was sampled for the next one.",
  };
}

/** What the curve of some rounds is of, in words that are true of it. */
export function meaning(shown: Round[]): string {
  const equal = shown.reduce((sum, each) => sum + (each.equal ?? 0), 0);
  const groups = shown.reduce((sum, each) => sum + each.groups, 0);
  const refused = "A round in which no group's rewards differ is refused, and is not here.";
  if (equal) return `The mean of every reward that was posted, groups of equal rewards included (${equal} of ${groups}). ${refused}`;
  return `The mean of the rewards that were posted, and no group of equal rewards is among them. If your loop drops those before it posts, this is not what the policy gets: post every group, and the server leaves out by itself what teaches nothing. ${refused}`;
}

/** The rounds of one adapter, oldest first; what failed or was cancelled is no round. */
export function rounds(jobs: TrainStatus[], adapter: string): Round[] {
  return jobs
    .filter((job) => job.adapter_name === adapter && job.kind === "grpo" && !["failed", "cancelled"].includes(job.state))
    .sort((a, b) => a.created_at.localeCompare(b.created_at))
    .map((job, i) => ({ job, round: i + 1, reward: reward(job), error: fact(job, "reward_stderr"), groups: fact(job, "groups") ?? 0, equal: fact(job, "groups_equal") }));
}
