/** Where rollouts come from: a page reads lists and groups, and does not know whether of a server, a job or a run. */
import { asJson, get, getExactly, request, segment } from "./http";
import type { RolloutDetail, RolloutFacets, RolloutGroup, RolloutPage, RunRollout, RunRolloutGroup, TextCompletion } from "./types";

/** A completion as it is shown: that of a run says more. */
export type ShownRollout = RolloutDetail & Partial<RunRollout>;
export type TokenId = number | bigint;
export type ShownGroup = Omit<RolloutGroup, "rollouts" | "prompt_token_ids"> & Partial<Pick<RunRolloutGroup, "columns">> & { rollouts: ShownRollout[]; prompt_token_ids: TokenId[] };

export interface Filter {
  contains: string;
  finish: string;
  version: string;
  step: string;
  rewardMin: string;
  rewardMax: string;
  /** name=value, a column of the prompt. */
  tag: string;
  /** The id of a rollout of the same prompt. */
  like: string;
  sort: string;
}

export interface RolloutSource {
  /** Whether its completions have advantages. */
  weighed: boolean;
  /** What may be filtered by, besides the text. */
  filters: ("reward" | "version" | "finish" | "step" | "tag")[];
  /** Orders besides the usual one, with their names. */
  sorts: [string, string][];
  /** What there is to filter by; null where nothing is counted. */
  facets: (() => Promise<RolloutFacets>) | null;
  /** What came after a page whose `newest` this is; null where rows do not come one by one. */
  since: ((filter: Filter, newest: number) => Promise<RolloutPage>) | null;
  /** Whether there is a model that can score its completions. */
  scores: boolean;
  page: (filter: Filter, after: number | null, limit: number) => Promise<RolloutPage>;
  group: (id: string) => Promise<ShownGroup>;
}

const LENGTHS: [string, string][] = [["longest", "longest"], ["shortest", "shortest"]];
const REWARDS: [string, string][] = [["best", "highest reward"], ["worst", "lowest reward"]];

/** What was sampled lately, or what one job was posted. */
export function liveSource(job: string | null): RolloutSource {
  const asked = (filter: Filter): Record<string, string | null> => {
    const common = { job, contains: filter.contains, like: filter.like, sort: filter.sort, reward_min: filter.rewardMin, reward_max: filter.rewardMax };
    return job ? common : { ...common, finish_reason: filter.finish, version: filter.version };
  };
  return {
    weighed: job !== null,
    filters: job === null ? ["reward", "version", "finish"] : ["reward"],
    sorts: job === null ? [["oldest", "oldest"], ...REWARDS, ...LENGTHS] : [...REWARDS, ...LENGTHS],
    scores: true,
    facets: job === null ? () => get<RolloutFacets>("v1/rollouts/facets") : null,
    since: job === null ? (filter, newest) => get<RolloutPage>("v1/rollouts", { ...asked(filter), sort: null, since: newest, limit: 2000 }) : null,
    page: (filter, after, limit) => get<RolloutPage>("v1/rollouts", { ...asked(filter), after, limit }),
    group: liveGroup,
  };
}

export function liveGroup(id: string): Promise<ShownGroup> {
  return getExactly<ShownGroup>(`v1/rollouts/${segment(id)}`);
}

/** What a run on disk sampled. */
export function runSource(run: string): RolloutSource {
  return {
    weighed: true,
    filters: ["reward", "step", "version", "finish", "tag"],
    sorts: [["oldest", "oldest"], ...REWARDS, ...LENGTHS],
    scores: false,
    facets: () => get<RolloutFacets>(`v1/runs/${segment(run)}/rollouts/facets`),
    since: null,
    page: (filter, after, limit) =>
      get<RolloutPage>(`v1/runs/${segment(run)}/rollouts`, {
        after,
        limit,
        step: filter.step,
        contains: filter.contains,
        finish_reason: filter.finish,
        version: filter.version,
        reward_min: filter.rewardMin,
        reward_max: filter.rewardMax,
        tag: filter.tag,
        like: filter.like,
        sort: filter.sort,
      }),
    group: (id) => getExactly<ShownGroup>(`v1/runs/${segment(run)}/rollouts/${segment(id)}`),
  };
}

/** The log-probability that a version gives each token of a completion, behind its prompt. */
export async function score(version: string, prompt: TokenId[], completion: number[], temperature: number): Promise<(number | null)[]> {
  const body = { model: version, prompt: [...prompt, ...completion], echo: true, logprobs: 0, max_tokens: 0, temperature };
  const answer = (await (await request("v1/completions", { method: "POST", ...asJson(body) })).json()) as TextCompletion;
  return answer.choices[0]?.logprobs?.token_logprobs.slice(prompt.length) ?? [];
}
