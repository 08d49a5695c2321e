/** Which metrics of a step are drawn together, what they are called, and which need no drawing; docs/metrics.md explains each. */
import { areTwins, isConstant } from "../../parts/curve";
import { number } from "../../state/format";
import type { Step } from "../../state/steps";

export interface Panel {
  title: string;
  metrics: string[];
  range?: [number | null, number | null];
  /** Or every metric whose name is like this. */
  like?: RegExp;
  /** What never exceeds this is rounding. */
  rounding?: number;
}

/** A metric that is said, not drawn: it never changed, or it is another one again. */
export interface Said {
  title: string;
  metric: string;
  value: string;
  why: string;
}

export interface Arranged {
  drawn: Panel[];
  said: Said[];
}

const FIXED: Panel[] = [
  { title: "Reward", metrics: ["reward/mean"] },
  { title: "Held-out reward", metrics: [], like: /^eval\/[^/]+\/reward$/ },
  { title: "Rewards by function", metrics: [], like: /^reward\/[^/]+\/mean$/ },
  { title: "Share of each function in the signal", metrics: [], like: /^reward\/[^/]+\/share$/, range: [0, 1] },
  { title: "Groups that teach nothing", metrics: ["reward/frac_zero_std"], range: [0, 1] },
  { title: "Loss", metrics: ["loss/policy", "loss/cross_entropy", "loss/custom"], rounding: 1e-6 },
  { title: "KL to the reference", metrics: ["kl/mean", "loss/kl"], range: [0, null], rounding: 1e-6 },
  { title: "Entropy", metrics: ["loss/entropy"], range: [0, null] },
  { title: "Share clipped", metrics: ["loss/clip_frac_low", "loss/clip_frac_high"], range: [0, null] },
  { title: "Gap between sampler and trainer", metrics: ["mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"], range: [0, null], rounding: 1e-4 },
  { title: "Importance ratio", metrics: ["loss/ratio_mean", "loss/ratio_max"] },
  { title: "Share cut at their longest", metrics: ["rollout/truncated_frac"], range: [0, 1] },
  { title: "Completion length", metrics: ["rollout/len_mean", "rollout/len_max"], range: [0, null] },
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

/** The panels of one or several jobs or runs: what is drawn, and what is better said. */
export function arranged(all: Step[][]): Arranged {
  const said: Said[] = [];
  const seen: { metric: string; title: string }[] = [];
  const drawn = panels(all.flat()).map((panel) => {
    const metrics = panel.metrics.filter((metric) => {
      const title = titleOf(panel, metric);
      const twin = seen.find((other) => all.every((steps) => areTwins(values(steps, metric), values(steps, other.metric))));
      const plain = unchanging(all, metric, panel.rounding);
      if (plain) said.push({ title, metric, ...plain });
      else if (twin) said.push({ title, metric, value: "", why: `the same as ${twin.title}` });
      else seen.push({ metric, title });
      return !plain && !twin;
    });
    return { ...panel, metrics };
  });
  return { drawn: drawn.filter((panel) => panel.metrics.length), said };
}

/** What is said of a metric that does not change; null of one that does. */
function unchanging(all: Step[][], metric: string, rounding = 0): { value: string; why: string } | null {
  const known = all.flatMap((steps) => values(steps, metric)).filter((value): value is number => value !== null);
  if (isConstant(known)) return { value: number(known.at(-1)), why: known.length > 1 ? "throughout" : "measured once" };
  const most = Math.max(...known.map(Math.abs));
  return most <= rounding ? { value: number(most), why: "at most: rounding" } : null;
}

function titleOf(panel: Panel, metric: string): string {
  return panel.metrics.length > 1 ? `${panel.title}, ${shortName(metric)}` : panel.title;
}

const NO_METRICS = new Set(["step", "time", "non_finite"]);

/** Metrics that no panel has, among them a user's own. */
export function others(steps: Step[]): Arranged {
  const had = panels(steps).flatMap((panel) => panel.metrics);
  const names = [...new Set(steps.flatMap((step) => Object.keys(step)))].filter((name) => !had.includes(name) && !NO_METRICS.has(name));
  const known = [...had];
  const found: Arranged = { drawn: [], said: [] };
  for (const name of names.sort()) {
    const twin = known.find((other) => areTwins(values(steps, name), values(steps, other)));
    const plain = unchanging([steps], name);
    if (plain) found.said.push({ title: name, metric: name, ...plain });
    else if (twin) found.said.push({ title: name, metric: name, value: "", why: `the same as ${twin}` });
    else found.drawn.push({ title: name, metrics: [name] });
    known.push(name);
  }
  return found;
}

export function values(steps: Step[], metric: string): (number | null)[] {
  return steps.map((step) => step[metric] ?? null);
}

/** "loss/clip_frac_low" is "clip_frac_low" beside others of its kind, and "reward/exact/mean" is "exact". */
export function shortName(metric: string): string {
  if (metric === "kl/mean") return "measured";
  if (metric === "loss/kl") return "in the loss";
  const [, name = metric, ...rest] = metric.split("/");
  return rest.length > 1 ? [name, ...rest].join("/") : name;
}
