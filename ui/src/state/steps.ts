/** What was measured at a step, by metric. */
export type Step = Record<string, number>;

/** `before` and then `more`: a record a step, in order. Training and evaluation write a line of the same step each. */
export function merged(before: Step[], more: Step[]): Step[] {
  const found = new Map(before.map((step) => [step.step ?? 0, step]));
  for (const line of more) found.set(line.step ?? 0, { ...found.get(line.step ?? 0), ...line });
  return [...found.values()].sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
}
