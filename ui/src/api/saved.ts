/**
 * The data of a report: `groupwise report` writes this page into one file, with its runs in an element of it. Requests are
 * then answered from there, as `groupwise ui` would answer them, so that no page needs to know.
 */
import type { FacetCount, MetricDefinition, RolloutFacets, RolloutRow, RunBeside, RunDetail, RunDiff, RunEvaluations, RunHealth, RunMetrics, RunRollout, RunRolloutGroup } from "./types";

/** A run in a report. `groups` are newest step first; the token ids and prompts of their completions are left out. */
export interface SavedRun {
  detail: RunDetail;
  steps: RunMetrics["steps"];
  health: RunHealth;
  evaluations: RunEvaluations;
  groups: RunRolloutGroup[];
  /** Pictures of their prompts by address, as data: URLs. */
  images: Record<string, string>;
  /** What is not in the file, in words. */
  left_out: string[];
}

export interface Saved {
  written: string;
  /** The table of metrics. */
  definitions: MetricDefinition[];
  runs: SavedRun[];
  /** Every run but the first beside the first. */
  held_out: RunBeside[];
}

const PREVIEW = 400; // characters of a prompt or a completion in a row
const END = "end"; // the cursor behind all there is

const element = typeof document === "undefined" ? null : document.getElementById("groupwise-report");
/** The runs of this report; null where the page came from a server. */
export const saved: Saved | null = element?.textContent ? (JSON.parse(element.textContent) as Saved) : null;

export function savedRun(id: string): SavedRun | null {
  return saved?.runs.find((run) => run.detail.run === id) ?? null;
}

/** What `groupwise ui` would answer. `path` may end with a query. */
export function answered(from: Saved, path: string, query: URLSearchParams): Response {
  const [, place, id = "", part = "", rollout = ""] = (path.split("?")[0] ?? "").split("/").map(decodeURIComponent);
  const run = from.runs.find((each) => each.detail.run === id);
  if (place === "runs" && !id) return json({ runs: from.runs.map((each) => each.detail) });
  if (place === "metrics") return json({ definitions: from.definitions });
  if (place === "diff") return json(diff(from, query.getAll("run")));
  if (!run) return missing("run_not_found", `there is no run ${id} in this report`);
  if (place === "events") return query.get("after") === END ? new Response(null, { status: 204 }) : streamed(metrics(run, null));
  if (!part) return json(run.detail);
  if (part === "metrics") return json(metrics(run, query.get("after")));
  if (part === "health") return json(run.health);
  if (part === "evaluations") return json(run.evaluations);
  if (part === "images") return drawn(run.images[`/${path}`]) ?? missing("image_not_found", "not in this report, for its size");
  if (part !== "rollouts") return missing("not_found", `a report has no ${path}`);
  if (!rollout) return json({ rows: rows(run, query), next: null });
  if (rollout === "facets") return json(facets(run));
  const group = run.groups.find((each) => each.group === rollout.split(".").slice(0, 2).join("."));
  return group ? json(group) : missing("rollout_not_found", `rollout ${rollout} is not in this report`);
}

function drawn(url: string | undefined): Response | null {
  const [, kind, body] = /^data:([^;]*);base64,(.*)$/.exec(url ?? "") ?? [];
  return kind && body ? new Response(Uint8Array.from(atob(body), (byte) => byte.charCodeAt(0)), { headers: { "content-type": kind } }) : null;
}

function metrics(run: SavedRun, after: string | null): RunMetrics {
  return { run: run.detail.run, steps: after === END ? [] : run.steps, next: END, anew: false };
}

function diff(from: Saved, ids: string[]): RunDiff {
  const configs = Object.fromEntries(from.runs.filter((run) => ids.includes(run.detail.run)).map((run) => [run.detail.run, run.detail.config]));
  const keys = new Set(Object.values(configs).flatMap((config) => Object.keys(config)));
  const values = (key: string): Set<string | undefined> => new Set(Object.values(configs).map((config) => JSON.stringify(config[key])));
  return { configs, differs: [...keys].filter((key) => values(key).size > 1), held_out: from.held_out };
}

const ORDERS: Record<string, (a: RolloutRow, b: RolloutRow) => number> = {
  oldest: (a, b) => Number(a.id.split(".")[0]) - Number(b.id.split(".")[0]),
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || 0,
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || 0,
  longest: (a, b) => b.completion_tokens - a.completion_tokens,
  shortest: (a, b) => a.completion_tokens - b.completion_tokens,
};

/** The completions that a search finds, each group's in the order in which they were sampled unless another is asked for. */
export function rows(run: SavedRun, query: URLSearchParams): RolloutRow[] {
  const found: RolloutRow[] = [];
  const like = run.groups.find((each) => each.group === query.get("like")?.split(".").slice(0, 2).join("."));
  const wanted = (query.get("contains") ?? "").toLowerCase();
  const [tag, value] = (query.get("tag") ?? "").split(/=(.*)/s);
  for (const group of run.groups) {
    if (query.has("like") && group.prompt !== like?.prompt) continue;
    if (tag && group.columns[tag] !== value) continue;
    const isAsked = group.prompt.toLowerCase().includes(wanted);
    const sampled = group.rollouts.toSorted((a, b) => place(a) - place(b));
    for (const { tokens: _, token_ids: __, logprobs: ___, ...rollout } of sampled) {
      if (!has(rollout, query) || !(isAsked || rollout.text.toLowerCase().includes(wanted))) continue;
      found.push({ ...rollout, prompt: group.prompt.slice(-PREVIEW), text: rollout.text.slice(0, PREVIEW) });
    }
  }
  const order = ORDERS[query.get("sort") ?? ""];
  return order ? found.sort(order) : found;
}

const MOST_TAGS = 50;

function facets(run: SavedRun): RolloutFacets {
  const all = run.groups.flatMap((group) => group.rollouts.map((rollout) => ({ group, rollout })));
  const names = [...new Set(run.groups.flatMap((group) => Object.keys(group.columns ?? {})))].sort();
  const tags = names.map((name) => [name, counts(all.map(({ group }) => group.columns[name]))] as const);
  return {
    counted: all.length,
    versions: counts(all.map(({ rollout }) => rollout.version)),
    finish_reasons: counts(all.map(({ rollout }) => rollout.finish_reason)),
    steps: [...new Set(run.groups.map((group) => Number(group.group.split(".")[0])))].sort((a, b) => b - a),
    tags: Object.fromEntries(tags.filter(([, values]) => values.length <= MOST_TAGS && values.length < all.length)),
  };
}

function counts(values: (string | null | undefined)[]): FacetCount[] {
  const found = new Map<string, number>();
  for (const value of values) if (value) found.set(value, (found.get(value) ?? 0) + 1);
  return [...found].map(([value, count]) => ({ value, count })).sort((a, b) => b.count - a.count);
}

const place = (rollout: RunRollout): number => Number(rollout.id.split(".")[2]);

function has(row: RolloutRow, query: URLSearchParams): boolean {
  const [least, most] = [query.get("reward_min"), query.get("reward_max")];
  if (least !== null && !(row.reward !== null && row.reward >= Number(least))) return false;
  if (most !== null && !(row.reward !== null && row.reward <= Number(most))) return false;
  const same = (name: string, value: string | null): boolean => !query.has(name) || query.get(name) === value;
  return same("finish_reason", row.finish_reason) && same("version", row.version) && same("step", row.id.split(".")[0] ?? null);
}

function json(data: unknown, status = 200): Response {
  return new Response(JSON.stringify(data), { status, headers: { "content-type": "application/json" } });
}

function streamed(data: RunMetrics): Response {
  return new Response(`id: ${data.next}\ndata: ${JSON.stringify(data)}\n\n`);
}

function missing(code: string, message: string): Response {
  return json({ error: { message, code, hint: "`groupwise ui RUN` shows all of a run", type: "invalid_request_error", param: null } }, 404);
}
