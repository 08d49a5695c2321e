/** What a run or a job came to: its reward before and after, and how sure the change is. */
import type { RunEvaluations } from "../api/types";
import type { Step } from "./steps";

export interface Measure {
  value: number;
  /** Its standard error: over prompts, or over steps where it is a mean of several; null where it is not known. */
  spread: number | null;
  /** When or of what it was measured. */
  what: string;
}

export interface Outcome {
  title: string;
  metric: string;
  before: Measure;
  after: Measure | null;
  note?: string;
  /** The change prompt by prompt, with its error, where both sides answered the same prompts. */
  paired?: { value: number; spread: number | null };
}

const EVALUATED = /^eval\/([^/]+)\/reward$/;
const MOST_STEPS = 10;
const SURE = 2; // standard errors

/** Of each kind of evaluation the first and the last; then the training reward, of the first and of the last steps. */
export function outcomes(steps: Step[]): Outcome[] {
  const names = [...new Set(steps.flatMap((step) => Object.keys(step)))].filter((name) => EVALUATED.test(name)).sort();
  const evaluated = names.flatMap((metric) => {
    const points = steps.filter((step) => Number.isFinite(step[metric])).map((step): Measure => ({
      value: step[metric] ?? 0, spread: step[`${metric}_stderr`] ?? null, what: `step ${step.step ?? 0}`,
    }));
    const [first, last] = [points[0], points.at(-1)];
    const title = `Held-out reward, ${EVALUATED.exec(metric)?.[1] ?? ""}`;
    return first ? [{ title, metric, before: first, after: points.length > 1 ? (last ?? null) : null }] : [];
  });
  const trained = ends(steps, "reward/mean");
  return trained ? [...evaluated, { title: "Training reward", metric: "reward/mean", ...trained }] : evaluated;
}

/** Outcomes with the changes of `found`, where these are of the same two evaluations. */
export function withPaired(all: Outcome[], found: RunEvaluations | null): Outcome[] {
  return all.map((outcome) => {
    const change = found?.paired.find((each) => `eval/${each.measure}` === outcome.metric);
    const isSame = outcome.before.what === `step ${found?.first}` && outcome.after?.what === `step ${found?.last}`;
    return change && isSame ? { ...outcome, paired: { value: change.difference, spread: change.error } } : outcome;
  });
}

/** The mean over the first and the last steps that have a metric, a quarter of them and ten at most. */
export function ends(steps: Step[], metric: string): { before: Measure; after: Measure | null } | null {
  const known = steps.filter((step) => Number.isFinite(step[metric]));
  if (!known.length) return null;
  const few = Math.max(1, Math.min(MOST_STEPS, Math.floor(known.length / 4)));
  const before = meanOf(known.slice(0, few), metric);
  return { before, after: known.length > 1 ? meanOf(known.slice(-few), metric) : null };
}

function meanOf(steps: Step[], metric: string): Measure {
  const values = steps.map((step) => step[metric] ?? 0);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1);
  const [first, last] = [steps[0]?.step, steps.at(-1)?.step];
  const what = first === last ? `step ${first}` : `steps ${first} to ${last}`;
  return { value: mean, spread: values.length > 1 ? Math.sqrt(variance / values.length) : null, what };
}

export interface Change {
  value: number;
  /** Its standard error. */
  spread: number | null;
  says: string;
}

/** After minus before; null where there is no after. */
export function changeOf({ before, after, paired }: Outcome): Change | null {
  if (!after) return null;
  if (paired && paired.spread !== null) {
    const isSure = Math.abs(paired.value) > SURE * paired.spread;
    return { value: paired.value, spread: paired.spread, says: `change prompt by prompt, ${isSure ? "beyond two standard errors" : "within two standard errors: it may be chance"}` };
  }
  const value = after.value - before.value;
  if (before.spread === null || after.spread === null) return { value, spread: null, says: "change; how sure it is, is not known" };
  const spread = Math.hypot(before.spread, after.spread);
  const isSure = Math.abs(value) > SURE * spread;
  return { value, spread, says: isSure ? "change, beyond two standard errors" : "change, within two standard errors: it may be chance" };
}
