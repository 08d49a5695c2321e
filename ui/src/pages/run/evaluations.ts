/** The evaluations of a run as a table: every mode and column with its first, last and best value. */
import type { Step } from "../../state/steps";

interface Point {
  step: number;
  value: number;
}

export interface Evaluated {
  /** As "greedy", "greedy, add" or "sampled, pass@8". */
  name: string;
  first: Point;
  last: Point;
  best: Point;
  /** The standard error of the last. */
  error: number | null;
}

const ERROR = "_stderr";

export function evaluated(steps: Step[]): Evaluated[] {
  const names = new Set(steps.flatMap((step) => Object.keys(step)).filter((name) => name.startsWith("eval/") && !name.endsWith(ERROR)));
  return [...names].flatMap((name) => {
    const points = steps.flatMap((step) => (Number.isFinite(step[name]) ? [{ step: step.step ?? 0, value: step[name] ?? 0 }] : []));
    const [first, last] = [points[0], points.at(-1)];
    const isCount = name.endsWith("/failed"); // of what went wrong: worth a row where there is any
    if (!first || !last || (isCount && points.every((point) => point.value === 0))) return [];
    const best = points.reduce((most, point) => (point.value > most.value ? point : most));
    const error = steps.find((step) => step.step === last.step)?.[name + ERROR] ?? null;
    const parts = name.split("/").slice(1).filter((part) => part !== "reward");
    return [{ name: parts.join(", "), first, last, best, error }];
  });
}

export function signed(change: number, number: (value: number) => string): string {
  return change > 0 ? `+${number(change)}` : number(change);
}
