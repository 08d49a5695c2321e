/** A line of a chart; with `low` and `high` a band around it. */
export interface Curve {
  label: string;
  values: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
}
