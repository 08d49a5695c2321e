/** Scores of completions: by an answer, by a pattern, by choosing the better of two; and which prompts are held out. */
export type Check = "number" | "exact" | "contains" | "pattern";

export const CHECKS: Record<Check, string> = {
  number: "last number equals the answer",
  exact: "text equals the answer",
  contains: "text contains the answer",
  pattern: "text matches a pattern",
};

/** The better of two completions of a group by their places; null: neither is better. */
export interface Vote {
  a: number;
  b: number;
  winner: number | null;
}

/** What a model wrote after its working, if it wrote any. */
function reply(text: string): string {
  return text.slice(text.lastIndexOf("</think>") + 1 && text.lastIndexOf("</think>") + "</think>".length).trim();
}

/** 1 or 0; null where there is nothing to compare with. */
export function checked(text: string, answer: string, check: Check, pattern: RegExp | null): number | null {
  if (check === "pattern") return pattern ? Number(pattern.test(text)) : null;
  const wanted = answer.trim();
  if (!wanted) return null;
  const said = reply(text);
  if (check === "exact") return Number(said === wanted);
  if (check === "contains") return Number(said.toLowerCase().includes(wanted.toLowerCase()));
  const last = said.match(/-?\d[\d,]*(?:\.\d+)?/g)?.at(-1);
  return Number(last !== undefined && Number(last.replaceAll(",", "")) === Number(wanted.replaceAll(",", "")));
}

/** The share of its comparisons that each of `size` completions won, a tie as half; null where it was not compared. */
export function won(votes: Vote[], size: number): (number | null)[] {
  return Array.from({ length: size }, (_, i) => {
    const mine = votes.filter((vote) => vote.a === i || vote.b === i);
    const points = mine.reduce((sum, vote) => sum + (vote.winner === null ? 0.5 : Number(vote.winner === i)), 0);
    return mine.length ? points / mine.length : null;
  });
}

/** The next two to compare: those that were compared least, of these the two whose shares are closest. Null when every
 * completion of `places` was compared `enough` times, or there is no new pair. */
export function nextPair(votes: Vote[], places: number[], enough: number): [number, number] | null {
  const times = (i: number): number => votes.filter((vote) => vote.a === i || vote.b === i).length;
  const shares = won(votes, Math.max(0, ...places) + 1);
  const met = new Set(votes.map((vote) => `${Math.min(vote.a, vote.b)} ${Math.max(vote.a, vote.b)}`));
  let best: { pair: [number, number]; cost: number } | null = null;
  for (const [n, a] of places.entries()) {
    for (const b of places.slice(n + 1)) {
      if (met.has(`${Math.min(a, b)} ${Math.max(a, b)}`) || (times(a) >= enough && times(b) >= enough)) continue;
      const cost = times(a) + times(b) + Math.abs((shares[a] ?? 0.5) - (shares[b] ?? 0.5));
      if (!best || cost < best.cost) best = { pair: [a, b], cost };
    }
  }
  return best?.pair ?? null;
}

/** Which of `count` prompts are held out so that they are about `share` of all, evenly spread; one is always taught. */
export function heldOut(count: number, share: number): boolean[] {
  const most = Math.min(count - 1, Math.round(count * share));
  return Array.from({ length: count }, (_, i) => Math.floor(((i + 1) * most) / count) > Math.floor((i * most) / count));
}

/** Prompts from pasted lines; what follows " => " is the answer. */
export function parsed(text: string): { text: string; answer: string }[] {
  return text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const at = line.lastIndexOf(" => ");
    return at < 0 ? { text: line, answer: "" } : { text: line.slice(0, at).trim(), answer: line.slice(at + 4).trim() };
  });
}

export function compiled(pattern: string): { regex: RegExp | null; problem: string } {
  if (!pattern) return { regex: null, problem: "" };
  try {
    return { regex: new RegExp(pattern, "u"), problem: "" };
  } catch (error) {
    return { regex: null, problem: (error as Error).message };
  }
}

export function mean(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
