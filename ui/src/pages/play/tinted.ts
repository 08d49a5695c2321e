/** How tokens are tinted: by surprise, by advantage, by how much a version changed its mind. */
import type { TokenLogprob } from "../../api/types";
import type { Token } from "../../parts/Tokens.svelte";
import { number } from "../../state/format";

const SURE = -0.05;
const SURPRISED = 3; // nats at which the tint is full

export function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share < 0.1 ? "< 0.1 %" : `${number(share)} %`;
}

function scale(logprob: number): number {
  return logprob > SURE ? 0 : Math.max(-1, logprob / SURPRISED);
}

/** Tokens with whole characters: one that is spread over several stands with the last of them. */
export function whole(tokens: TokenLogprob[]): TokenLogprob[] {
  const decoder = new TextDecoder();
  return tokens.map((token) => ({ ...token, token: token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token }));
}

/** A token of a chat answer: the less likely it was, the stronger the tint. */
export function surprise(token: TokenLogprob): Token {
  const others = token.top_logprobs.filter((other) => other.token !== token.token).slice(0, 3);
  const facts = [`logprob ${number(token.logprob)}`, percent(token.logprob)];
  if (others.length) facts.push(`or ${others.map((other) => `${JSON.stringify(other.token)} ${percent(other.logprob)}`).join(", ")}`);
  return { text: token.token, tint: scale(token.logprob), facts };
}

/** The same of a recorded rollout. */
export function recorded(text: string, logprob: number | null): Token {
  if (logprob === null) return { text, tint: 0, facts: ["nobody recorded its logprob"] };
  return { text, tint: scale(logprob), facts: [`logprob ${number(logprob)}`, percent(logprob)] };
}

/** The advantage is one for the whole completion: which way training pushed each of its tokens. */
export function pushed(text: string, logprob: number | null, advantage: number | null): Token {
  const said = recorded(text, logprob);
  return { ...said, tint: Math.max(-1, Math.min(1, (advantage ?? 0) / 2)), facts: [`advantage ${number(advantage)}`, ...said.facts] };
}

/** What the policy did not write, or was not trained on. */
export function untrained(text: string, logprob: number | null): Token {
  return { text, tint: 0, facts: logprob === null ? ["not written by the policy, or not recorded"] : ["not trained", ...recorded(text, logprob).facts] };
}

/** How far the trainer's recorded logprob is from the sampler's: beyond 0.1 nats the tint is full. */
export function apart(text: string, logprob: number | null, gap: number | null): Token {
  if (gap === null) return { text, tint: 0, facts: ["the trainer's logprob was not recorded"] };
  return { text, tint: Math.max(-1, Math.min(1, gap / 0.1)), facts: [`gap ${number(gap)} nats`, ...recorded(text, logprob).facts] };
}

/** How another version's logprob compares with the sampler's: as a difference, or as the importance ratio. */
export function changed(text: string, before: number | null, after: number | null, as: "gap" | "ratio"): Token {
  if (before === null || after === null) return { text, tint: 0, facts: ["not known"] };
  const gap = after - before;
  const word = as === "gap" ? `gap ${number(gap)} nats` : `ratio ${number(Math.exp(gap))}`;
  return { text, tint: Math.max(-1, Math.min(1, gap)), facts: [word, `${percent(before)} → ${percent(after)}`] };
}
