/** Which metrics of a step are drawn together, and what they are called; docs/metrics.md explains each. */
import type { Step } from "../../state/job.svelte";

export interface Panel {
  title: string;
  metrics: string[];
  range?: [number | null, number | null];
}

const FIXED: Panel[] = [
  { title: "Reward", metrics: ["reward/mean"] },
  { title: "Loss", metrics: ["loss/total", "loss/policy", "loss/cross_entropy"] },
  { title: "KL from base", metrics: ["loss/kl"], range: [0, null] },
  { title: "Entropy", metrics: ["loss/entropy"], range: [0, null] },
  { title: "Share clipped", metrics: ["loss/clip_frac_low", "loss/clip_frac_high"], range: [0, null] },
  { title: "Gap between sampler and trainer", metrics: ["mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"], range: [0, null] },
  { title: "Importance ratio", metrics: ["loss/ratio_mean", "loss/ratio_max"] },
  { title: "Completion length", metrics: ["rollout/len_mean", "rollout/len_max"], range: [0, null] },
  { title: "Groups that teach nothing", metrics: ["reward/frac_zero_std"], range: [0, 1] },
  { title: "Staleness", metrics: ["rollout/staleness_mean", "rollout/staleness_max"], range: [0, null] },
  { title: "Gradient norm", metrics: ["optim/grad_norm"], range: [0, null] },
  { title: "Learning rate", metrics: ["optim/lr"], range: [0, null] },
  { title: "Tokens a second", metrics: ["perf/tok_s"], range: [0, null] },
  { title: "Seconds a step", metrics: ["time/step_s"], range: [0, null] },
];
const NOT_REWARDS = new Set(["reward/mean", "reward/std", "reward/frac_zero_std"]);

/** Every panel that these steps have numbers for. Rewards with a name of their own get one together. */
export function panels(steps: Step[]): Panel[] {
  const there = new Set(steps.flatMap((step) => Object.keys(step)));
  const rewards = [...there].filter((name) => name.startsWith("reward/") && !NOT_REWARDS.has(name));
  const parts: Panel[] = rewards.length ? [{ title: "Rewards by function", metrics: rewards.sort() }] : [];
  const [first, ...rest] = FIXED.map((panel) => ({ ...panel, metrics: panel.metrics.filter((name) => there.has(name)) }));
  return [first, ...parts, ...rest].filter((panel): panel is Panel => !!panel?.metrics.length);
}

export function values(steps: Step[], metric: string): (number | null)[] {
  return steps.map((step) => step[metric] ?? null);
}

/** "loss/clip_frac_low" is "clip_frac_low" beside others of its kind. */
export function shortName(metric: string): string {
  return metric.slice(metric.indexOf("/") + 1);
}

/** Whether there is something to see in a panel: what was posted with a job is the same in all of its steps. */
export function varies(steps: Step[], panel: Panel): boolean {
  return panel.metrics.some((metric) => new Set(values(steps, metric)).size > 1);
}
