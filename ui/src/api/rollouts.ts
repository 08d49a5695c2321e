/** Where rollouts come from: a page reads lists and groups, and does not know whether of a server, a job or a run. */
import { asJson, get, request, segment } from "./http";
import type { RolloutDetail, RolloutGroup, RolloutPage, RunRollout, RunRolloutGroup, TextCompletion } from "./types";

/** A completion as it is shown: that of a run says more. */
export type ShownRollout = RolloutDetail & Partial<RunRollout>;
export type ShownGroup = Omit<RolloutGroup, "rollouts"> & Partial<Pick<RunRolloutGroup, "columns">> & { rollouts: ShownRollout[] };

export interface Filter {
  contains: string;
  truncated: boolean;
  version: string;
  step: string;
  rewardMin: string;
  rewardMax: string;
}

export interface RolloutSource {
  /** Whether its completions have rewards. */
  rewarded: boolean;
  /** What may be filtered by, besides the text. */
  filters: ("reward" | "version" | "cut" | "step")[];
  /** Whether there is a model that can score its completions. */
  scores: boolean;
  page: (filter: Filter, after: number | null, limit: number) => Promise<RolloutPage>;
  group: (id: string) => Promise<ShownGroup>;
}

/** What was sampled lately, or what one job was posted. */
export function liveSource(job: string | null): RolloutSource {
  return {
    rewarded: job !== null,
    filters: job === null ? ["version", "cut"] : ["reward"],
    scores: true,
    page: (filter, after, limit) =>
      get<RolloutPage>("v1/rollouts", {
        job,
        after,
        limit,
        contains: filter.contains,
        finish_reason: !job && filter.truncated ? "length" : null,
        version: job ? null : filter.version,
        reward_min: job ? filter.rewardMin : null,
        reward_max: job ? filter.rewardMax : null,
      }),
    group: (id) => get<RolloutGroup>(`v1/rollouts/${segment(id)}`),
  };
}

/** What a run on disk sampled. */
export function runSource(run: string): RolloutSource {
  return {
    rewarded: true,
    filters: ["reward", "step", "cut"],
    scores: false,
    page: (filter, after, limit) =>
      get<RolloutPage>(`v1/runs/${segment(run)}/rollouts`, {
        after,
        limit,
        step: filter.step,
        contains: filter.contains,
        finish_reason: filter.truncated ? "length" : null,
        reward_min: filter.rewardMin,
        reward_max: filter.rewardMax,
      }),
    group: (id) => get<RunRolloutGroup>(`v1/runs/${segment(run)}/rollouts/${segment(id)}`),
  };
}

/** The log-probability that a version gives each token of a completion, behind its prompt. */
export async function score(version: string, prompt: number[], completion: number[], temperature: number): Promise<(number | null)[]> {
  const body = { model: version, prompt: [...prompt, ...completion], echo: true, logprobs: 0, max_tokens: 0, temperature };
  const answer = (await (await request("v1/completions", { method: "POST", ...asJson(body) })).json()) as TextCompletion;
  return answer.choices[0]?.logprobs?.token_logprobs.slice(prompt.length) ?? [];
}
