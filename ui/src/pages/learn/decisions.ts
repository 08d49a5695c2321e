/** What gates, shadows and canaries decided, from what the server says that it did; what it waits for now; who rated. */
import type { FeedbackAnswer, LearnAnswer, LearnTransition } from "../../api/types";
import { count, number } from "../../state/format";

/** What was measured on one set of prompts, answers or ratings. */
export interface Measured {
  /** Rewards of a gate and a shadow, ratings of a canary: means of the version, and of the one it was compared with. */
  mine: number | null;
  other: number | null;
  difference: number | null;
  /** The lower confidence bound of the difference, at which confidence, and how low it may be. */
  bound: number | null;
  confidence: number | null;
  margin: number | null;
  used: number | null;
  needed: number | null;
}

/** One decision about a version: what it was compared with, by how much it differed, and on how much evidence. */
export interface Decision extends Measured {
  seq: number;
  at: string;
  version: string;
  against: string;
  job: string | null;
  stage: "gate" | "shadow" | "canary";
  outcome: string;
  passed: boolean;
  reason: string;
  /** Ratings of the other version, of which a canary has its own. */
  usedOther: number | null;
  /** The same on the prompts that confirm; null where it did not get so far, or there are none. */
  confirmed: Measured | null;
}

const DECIDED: Record<string, [Decision["stage"] | null, string]> = {
  gate_passed: ["gate", "passed"], gate_refused: ["gate", "refused"], shadow_passed: ["shadow", "passed"], shadow_refused: ["shadow", "refused"],
  promoted: [null, "went live"], rolled_back: [null, "rolled back"], trial_ended: [null, "ended"],
};
const UNITS = { gate: ["held-out prompt", "held-out prompts"], shadow: ["pair of answers", "pairs of answers"], canary: ["rating", "ratings"] } as const;

export function isDecision(transition: LearnTransition): boolean {
  return transition.kind in DECIDED;
}

/** Decisions in the order of the transitions, which is newest first. */
export function decisions(transitions: LearnTransition[]): Decision[] {
  return transitions.flatMap((each, i) => {
    const found = DECIDED[each.kind];
    if (!found) return [];
    const [fixed, outcome] = found;
    const data = each.data;
    const version = String(data["version"] ?? "");
    const began = transitions.slice(i).find((earlier) => earlier.data["version"] === version && earlier.kind.endsWith("_began"));
    const stage = fixed ?? (data["stage"] === "shadow" || (data["stage"] === undefined && began?.kind === "shadow_began") ? "shadow" : "canary");
    const isRated = stage === "canary";
    const measured = measuredIn(data, isRated);
    const most = began?.data["ratings"];
    return [{
      seq: each.seq, at: each.at, version, against: String(data["against"] ?? ""), job: typeof data["job_id"] === "string" ? data["job_id"] : null,
      stage, outcome, passed: outcome === "passed" || outcome === "went live", reason: each.message.slice(each.message.indexOf(": ") + 2),
      ...measured, needed: isRated ? (typeof most === "number" ? most : null) : measured.needed,
      usedOther: isRated && typeof data["ratings_active"] === "number" ? data["ratings_active"] : null,
      confirmed: "confirm_prompts" in data ? measuredIn(data, false, "confirm_") : null,
    }];
  });
}

function measuredIn(data: Record<string, unknown>, isRated: boolean, prefix = ""): Measured {
  const value = (name: string): number | null => {
    const found = data[prefix + name];
    return typeof found === "number" ? found : null;
  };
  const [mine, other] = isRated ? [value("rating"), value("rating_active")] : [value("reward"), value("reward_active")];
  const error = value("error");
  return {
    mine, other, difference: value("difference") ?? (mine !== null && other !== null ? mine - other : null),
    bound: value("lower_bound"), confidence: error === null ? null : 1 - error, margin: value("margin"),
    used: isRated ? value("ratings") : value("prompts"), needed: value("prompts_needed"),
  };
}

/** A difference with its bound, as one reads it. */
export function differs(each: Measured): string {
  if (each.difference === null) return "";
  const signed = (value: number): string => (value > 0 ? `+${number(value)}` : number(value).replace("-", "−"));
  const bound = each.bound === null ? "" : `, surely not below ${signed(each.bound)}${each.confidence === null ? "" : ` (${percent(each.confidence)})`}`;
  return `${signed(each.difference)}${bound}${each.margin === null ? "" : `; ${signed(-each.margin)} is allowed`}`;
}

/** 0.95 as 95%, and 0.99998 not as 100%. */
function percent(share: number): string {
  const left = 100 * (1 - share);
  return `${Number((100 - left).toFixed(left < 0.1 ? 4 : left < 1 ? 2 : 1))}%`;
}

/** How much evidence a decision was made on, and how much would have done. */
export function evidence(each: Decision, measured: Measured = each): string {
  const { used, needed } = measured;
  if (used === null) return "";
  const [one, many] = UNITS[each.stage];
  const told = count(used, one, many);
  const beside = each.usedOther === null ? "" : `, ${each.usedOther.toLocaleString("en")} of ${each.against}`;
  if (each.stage === "canary") return `${told} of it${beside}${needed === null ? "" : `; ${needed.toLocaleString("en")} end it at the latest`}`;
  if (needed !== null) return needed > used ? `${told}; ${needed.toLocaleString("en")} like these would do` : `${told}, which are enough`;
  return measured.bound === null ? told : `${told}; no number like these would do`;
}

/** What goes on now, in words, and how far it is; `of` is null where nothing is counted. */
export interface Waiting {
  text: string;
  have: number;
  of: number | null;
}

export function waiting(known: LearnAnswer): Waiting {
  if (known.trial !== null) {
    const isShadow = known.trial_stage === "shadow";
    const have = (isShadow ? known.trial_pairs : known.trial_ratings) ?? 0;
    const of = known.trial_most;
    const more = Math.max(0, (of ?? 0) - have);
    const share = `${Math.round(100 * (known.trial_share ?? 0))}% of the requests`;
    const does = isShadow ? `answers ${share} once more, unseen` : `answers ${share} in place of ${known.active}`;
    const left = of === null ? "" : isShadow ? ` ${count(more, "more pair", "more pairs")} of answers until it is judged.` : ` ${count(more, "more rating", "more ratings")} of its answers end it at the latest; it ends before as soon as they say enough.`;
    return { text: `${known.trial} is on trial: it ${does}.${left}`, have, of };
  }
  if (known.job_id !== null) return { text: "A job learns from ratings now; what is rated meanwhile waits for the next.", have: 0, of: null };
  if (!known.enabled) return { text: "This server makes no jobs of feedback by itself; ratings are kept.", have: 0, of: null };
  if (known.paused) return { text: "Paused: ratings are kept, and no job is made of them until it is resumed.", have: known.ratings, of: known.after };
  const more = Math.max(0, (known.after ?? 0) - known.ratings);
  return { text: more ? `${count(more, "more rating", "more ratings")} with something to learn make the next job.` : "There are enough ratings for a job.", have: known.ratings, of: known.after };
}

export interface Rater {
  id: string;
  user: string | null;
  key: string | null;
  total: number;
  /** The mean of the scores; null where only corrections and comparisons were given. */
  mean: number | null;
  states: Record<FeedbackAnswer["state"], number>;
}

/** What stands for who rates: a user, within the key that a rating came with. */
export function rater(of: { user: string | null; key?: string | null }): string {
  return JSON.stringify([of.key ?? null, of.user]);
}

/** What each rater's feedback came to, who said most first. */
export function raters(feedback: FeedbackAnswer[]): Rater[] {
  const found = new Map<string, FeedbackAnswer[]>();
  for (const each of feedback) found.set(rater(each), [...(found.get(rater(each)) ?? []), each]);
  return [...found.values()].map((its) => {
    const scores = its.flatMap((each) => (each.score === null ? [] : [each.score]));
    const states = { waiting: 0, training: 0, trained: 0, dropped: 0, distrusted: 0 };
    for (const each of its) states[each.state] += 1;
    return { id: rater(its[0]!), user: its[0]!.user, key: its[0]!.key ?? null, total: its.length, mean: scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null, states };
  }).sort((a, b) => b.total - a.total);
}

/** What somebody said, in a few words. */
export function said(each: FeedbackAnswer): string {
  const parts = [
    each.score === null ? "" : each.score === 1 ? "good" : each.score === 0 ? "bad" : `score ${number(each.score)}`,
    each.correction === null ? "" : `should have said: ${each.correction}`,
    each.better_than === null ? "" : "better than another answer",
    each.comment ? `“${each.comment}”` : "",
  ];
  return parts.filter(Boolean).join("; ");
}
