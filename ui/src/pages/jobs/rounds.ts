/** Jobs that make versions of one adapter, as rounds: the reward rises from one to the next. */
import type { TrainStatus } from "../../api/types";

export interface Round {
  job: TrainStatus;
  round: number;
  reward: number | null;
}

export function reward(job: TrainStatus): number | null {
  const value = job.summary["reward_mean"] ?? job.metrics["reward/mean"];
  return typeof value === "number" ? value : null;
}

/** The rounds of one adapter, oldest first; what failed or was cancelled is no round. */
export function rounds(jobs: TrainStatus[], adapter: string): Round[] {
  return jobs
    .filter((job) => job.adapter_name === adapter && job.kind === "grpo" && !["failed", "cancelled"].includes(job.state))
    .sort((a, b) => a.created_at.localeCompare(b.created_at))
    .map((job, i) => ({ job, round: i + 1, reward: reward(job) }));
}
