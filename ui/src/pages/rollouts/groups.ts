/** Rollouts by their prompt: those that stand beside each other and are of one group. */
import type { RolloutRow } from "../../api/types";

export interface PromptRow {
  rows: RolloutRow[];
  /** The one of the highest reward; the first where there are none. */
  best: RolloutRow;
  /** Of their rewards; null without any. */
  mean: number | null;
  /** The standard deviation of their rewards; null for fewer than two. */
  spread: number | null;
}

export function grouped(rows: RolloutRow[]): PromptRow[] {
  const found: RolloutRow[][] = [];
  for (const row of rows) {
    const last = found.at(-1);
    if (last?.[0]?.group === row.group) last.push(row);
    else found.push([row]);
  }
  return found.map((each) => {
    const best = each.reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
    const rewards = each.flatMap((row) => (row.reward === null ? [] : [row.reward]));
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const spread = mean !== null && rewards.length > 1 ? Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (rewards.length - 1)) : null;
    return { rows: each, best, mean, spread };
  });
}
