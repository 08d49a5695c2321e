/** What gates, shadows and canaries decided, as sentences and numbers. */
import type { LearnAnswer } from "../../api/types";
import { count, number } from "../../state/format";

type Transition = LearnAnswer["transitions"][number];

export interface Decision {
  seq: number;
  at: string;
  version: string | null;
  word: string;
  /** As `State` colours it. */
  state: "live" | "failed" | "queued" | "finished";
  /** What was measured; "" where nothing was. */
  measured: string;
  why: string;
  job: string | null;
}

const WORDS: Record<string, [string, Decision["state"]]> = {
  gate_passed: ["passed the gate", "finished"],
  gate_refused: ["refused by the gate", "failed"],
  shadow_began: ["answers unseen, beside the active one", "queued"],
  shadow_passed: ["passed as a shadow", "finished"],
  shadow_refused: ["refused as a shadow", "failed"],
  canary_began: ["answers some of the requests", "queued"],
  promoted: ["went live", "live"],
  rolled_back: ["was taken back", "failed"],
  trial_ended: ["its trial ended", "queued"],
  prompts_worn: ["prompts are worn out", "failed"],
};

/** The decisions among what happened, newest first. */
export function decisions(transitions: Transition[]): Decision[] {
  return transitions.flatMap((each) => {
    const known = WORDS[each.kind];
    if (!known) return [];
    const [word, state] = known;
    const version = text(each.data["version"]);
    return [{ seq: each.seq, at: each.at, version, word, state, measured: measured(each.data), why: why(each.message, version), job: text(each.data["job_id"]) }];
  });
}

/** What else happened: jobs, pauses, ratings that were given back. */
export function others(transitions: Transition[]): Transition[] {
  return transitions.filter((each) => !(each.kind in WORDS));
}

function measured(data: Record<string, unknown>): string {
  const of = (name: string): number | null => (typeof data[name] === "number" ? data[name] : null);
  const said: string[] = [];
  const [reward, before, difference, bound, prompts] = ["reward", "reward_active", "difference", "lower_bound", "prompts"].map(of);
  if (reward != null && before != null) said.push(`held-out reward ${number(reward)}, of the active version ${number(before)}`);
  if (difference != null && bound != null) said.push(`difference ${signed(difference)}, surely at least ${signed(bound)} (error ${number(100 * (of("error") ?? 0.05), 2)}%)`);
  if (prompts != null) said.push(`${count(prompts, "prompt")}${of("look") === null ? "" : `, look ${of("look")}`}`);
  const needed = of("ratings_needed");
  if (needed !== null) said.push(`decides by ${count(of("ratings") ?? needed, "rating")} at most`);
  const kl = of("kl");
  if (kl !== null) said.push(`KL ${number(kl)}`);
  return said.join(" · ");
}

/** The reason of a message, whose head (`math@3 was refused: `) is shown otherwise. */
function why(message: string, version: string | null): string {
  const at = message.indexOf(": ");
  return version !== null && at > 0 && message.startsWith(version) ? message.slice(at + 2) : message;
}

function signed(value: number): string {
  return `${value > 0 ? "+" : value < 0 ? "−" : "±"}${number(Math.abs(value))}`;
}

function text(value: unknown): string | null {
  return typeof value === "string" ? value : null;
}
