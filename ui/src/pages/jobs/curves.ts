/** Which metrics of a step are drawn together, and what they are called; docs/metrics.md explains each. */
import type { Step } from "../../state/steps";

export interface Panel {
  title: string;
  metrics: string[];
  range?: [number | null, number | null];
  /** Or every metric whose name is like this. */
  like?: RegExp;
}

const FIXED: Panel[] = [
  { title: "Reward", metrics: ["reward/mean"] },
  { title: "Rewards by function", metrics: [], like: /^reward\/[^/]+\/mean$/ },
  { title: "Held-out reward", metrics: [], like: /^eval\/[^/]+\/reward$/ },
  { title: "Share of each function in the signal", metrics: [], like: /^reward\/[^/]+\/share$/, range: [0, 1] },
  { title: "Loss", metrics: ["loss/total", "loss/policy", "loss/cross_entropy"] },
  { title: "KL from base", metrics: ["loss/kl"], range: [0, null] },
  { title: "KL from the reference", metrics: ["kl/mean"], range: [0, null] },
  { title: "Entropy", metrics: ["loss/entropy"], range: [0, null] },
  { title: "Share clipped", metrics: ["loss/clip_frac_low", "loss/clip_frac_high"], range: [0, null] },
  { title: "Gap between sampler and trainer", metrics: ["mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"], range: [0, null] },
  { title: "Importance ratio", metrics: ["loss/ratio_mean", "loss/ratio_max"] },
  { title: "Share cut at their longest", metrics: ["rollout/truncated_frac"], range: [0, 1] },
  { title: "Completion length", metrics: ["rollout/len_mean", "rollout/len_max"], range: [0, null] },
  { title: "Groups that teach nothing", metrics: ["reward/frac_zero_std"], range: [0, 1] },
  { title: "Staleness", metrics: ["rollout/staleness_mean", "rollout/staleness_max"], range: [0, null] },
  { title: "Gradient norm", metrics: ["optim/grad_norm"], range: [0, null] },
  { title: "Learning rate", metrics: ["optim/lr"], range: [0, null] },
  { title: "Tokens a second", metrics: ["perf/tok_s"], range: [0, null] },
  { title: "Seconds a step", metrics: ["time/step_s"], range: [0, null] },
];

/** Every panel that these steps have numbers for. Rewards with a name of their own get one together. */
export function panels(steps: Step[]): Panel[] {
  const there = [...new Set(steps.flatMap((step) => Object.keys(step)))].sort();
  return FIXED.map((panel) => {
    const { like } = panel;
    return { ...panel, metrics: like ? there.filter((name) => like.test(name)) : panel.metrics.filter((name) => there.includes(name)) };
  }).filter((panel) => panel.metrics.length);
}

const NO_METRICS = new Set(["step", "time", "non_finite"]);

/** Metrics that no panel draws, among them a user's own, as far as they change. */
export function others(steps: Step[]): Panel[] {
  const drawn = new Set(panels(steps).flatMap((panel) => panel.metrics));
  const names = [...new Set(steps.flatMap((step) => Object.keys(step)))].filter((name) => !drawn.has(name) && !NO_METRICS.has(name));
  return names.sort().map((name) => ({ title: name, metrics: [name] })).filter((panel) => varies(steps, panel));
}

export function values(steps: Step[], metric: string): (number | null)[] {
  return steps.map((step) => step[metric] ?? null);
}

/** "loss/clip_frac_low" is "clip_frac_low" beside others of its kind, and "reward/exact/mean" is "exact". */
export function shortName(metric: string): string {
  const [, name = metric, ...rest] = metric.split("/");
  return rest.length > 1 ? [name, ...rest].join("/") : name;
}

/** Whether there is something to see in a panel: what was posted with a job is the same in all of its steps. */
export function varies(steps: Step[], panel: Panel): boolean {
  return panel.metrics.some((metric) => new Set(values(steps, metric)).size > 1);
}
