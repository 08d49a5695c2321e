/** Lines of a chart, and what is computed of them: smoothing, labels of an axis, whether there is anything to see. */

/** A line of a chart; with `low` and `high` a band around it. */
export interface Curve {
  label: string;
  values: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
}

type Values = (number | null | undefined)[];

const finite = (values: Values): number[] => values.filter((value): value is number => Number.isFinite(value));

const FEWEST = 10; // values worth smoothing: a handful of evaluations is read as it is

/**
 * An exponential moving average without the bias towards its start: `weight` (0 to below 1) is the share of what came
 * before. Where there is no value there is none.
 */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0 || finite(values).length < FEWEST) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const SAME = 1e-4; // of the largest value: less than the three digits that are shown

/** Whether all values are one as far as is shown; so is a single value. */
export function isConstant(values: Values): boolean {
  const known = finite(values);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  return !known.length || most - least <= SAME * Math.max(Math.abs(least), Math.abs(most));
}

const TWIN = 1e-6; // of the largest value: float32 rounds there

/** Whether two series say the same: values at the same places, equal but for rounding. */
export function areTwins(one: Values, other: Values): boolean {
  const size = Math.max(...finite(one).map(Math.abs), 0);
  return one.every((value, i) => {
    const twin = other[i];
    if (value === null || value === undefined || twin === null || twin === undefined) return (value ?? null) === (twin ?? null);
    return Math.abs(value - twin) <= TWIN * size;
  });
}

/** Whether a logarithmic axis shows more: all above 0, over two orders of magnitude. */
export function suitsLog(all: Values[]): boolean {
  const known = all.flatMap(finite);
  return known.length > 1 && known.every((value) => value > 0) && Math.max(...known) >= 100 * Math.min(...known);
}

const MOST_DIGITS = 9;

/** The ticks of an axis, with as many digits as say where they are; "" for a tick that has no label. */
export function tickLabels(ticks: (number | null)[]): string[] {
  const known = finite(ticks);
  const most = Math.max(...known.map(Math.abs), 0);
  const gaps = known.slice(1).map((tick, i) => Math.abs(tick - (known[i] ?? 0))).filter((gap) => gap > 0);
  const near = Math.min(...gaps, most || 1) / 100;
  const isTiny = most >= 1e6 || most < 1e-3;
  const written = (tick: number, digits: number): string => (isTiny ? tick.toExponential(digits) : tick.toFixed(digits));
  let digits = 0;
  while (digits < MOST_DIGITS && known.some((tick) => Math.abs(Number(written(tick, digits)) - tick) > near)) digits += 1;
  const shown = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return ticks.map((tick) => {
    if (tick === null || !Number.isFinite(tick)) return "";
    if (tick === 0) return "0";
    return isTiny ? written(tick, digits).replace("e+", "e") : tick.toLocaleString("en", shown);
  });
}
