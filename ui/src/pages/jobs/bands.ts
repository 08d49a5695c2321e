/** Several jobs or runs as curves: those that differ only in their seed are one, a mean with a band. */
import type { Curve } from "../../parts/curve";
import type { Step } from "../../state/steps";

export interface Subject {
  id: string;
  name: string;
  config: Record<string, unknown>;
  steps: Step[];
}

/** A band from the least to the most, or a standard deviation (n - 1) to either side; or a curve for each seed. */
export type Spread = "range" | "std" | "each";

/** Keys that do not make it another experiment: the seed, and where it is kept. */
const NOT_MATTERS = /^(seed|run_dir|output_dir|resume|folder|auto_load|checkpoint_interval|(tracking|checkpoint)\..*)$/;

const NAMES = new Set(["name", "output_name"]);

/** The subjects by what they share: lists of one, and of those that are the same but for the seed. */
export function families(subjects: Subject[]): Subject[][] {
  const found = new Map<string, Subject[]>();
  for (const subject of subjects) {
    const key = differsInSeed(subject, subjects) ? experiment(subject) : subject.id;
    found.set(key, [...(found.get(key) ?? []), subject]);
  }
  return [...found.values()];
}

/** Whether another one is the same but for the seed; two of the same seed are no sample of anything. */
function differsInSeed(subject: Subject, all: Subject[]): boolean {
  const same = all.filter((other) => experiment(other) === experiment(subject));
  return same.length > 1 && new Set(same.map((each) => JSON.stringify(each.config["seed"]))).size === same.length;
}

/** What the configuration says besides the seed. Names count without their numbers: "lr-seed-0" is "lr-seed-1" again. */
function experiment(subject: Subject): string {
  const kept = Object.entries(subject.config)
    .filter(([key]) => !NOT_MATTERS.test(key))
    .map(([key, value]) => [key, NAMES.has(key) ? String(value).replace(/\d+/g, "#") : value] as const);
  return JSON.stringify(kept.sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** The steps that any of them has, in order. */
export function allSteps(subjects: Subject[]): number[] {
  return [...new Set(subjects.flatMap((each) => each.steps.map((step) => step.step ?? 0)))].sort((a, b) => a - b);
}

/** A curve for each family over the steps `x`. A band is there where every one of its members has a value. */
export function curves(subjects: Subject[], metric: string, x: number[], spread: Spread): Curve[] {
  const groups = spread === "each" ? subjects.map((each) => [each]) : families(subjects);
  return groups.map((group) => {
    const values = group.map((each) => aligned(each.steps, metric, x));
    const [first, only] = [group[0], values[0]];
    if (!first || !only || values.length === 1) return { label: first?.name ?? "", values: only ?? [] };
    const all = x.map((_, i) => values.map((each) => each[i]).filter((value): value is number => typeof value === "number"));
    const whole = all.map((each) => (each.length === values.length ? each : null));
    const [low, high] = [whole.map((each) => each && ends(each, spread)[0]), whole.map((each) => each && ends(each, spread)[1])];
    return { label: `${common(group.map((each) => each.name))} (${group.length} seeds)`, values: whole.map((each) => each && mean(each)), low, high };
  });
}

function aligned(steps: Step[], metric: string, x: number[]): (number | null)[] {
  const by = new Map(steps.map((step) => [step.step, step[metric] ?? null]));
  return x.map((step) => by.get(step) ?? null);
}

function ends(values: number[], spread: Spread): [number, number] {
  if (spread === "range") return [Math.min(...values), Math.max(...values)];
  const [middle, n] = [mean(values), values.length];
  const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (n - 1));
  return [middle - deviation, middle + deviation];
}

function mean(values: number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** What names begin with together, up to a boundary; the first of them where they share nothing. */
export function common(names: string[]): string {
  const [first = ""] = names;
  let end = 0;
  while (end < first.length && names.every((name) => name[end] === first[end])) end += 1;
  return first.slice(0, end).replace(/[^\p{L}\p{N}]*[\p{L}]?$/u, "") || first;
}
