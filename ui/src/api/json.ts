/**
 * JSON with whole numbers that a double does not hold: the token ids of images begin at 2^62. They are read as BigInt and
 * written as they were.
 */
const TOKENS = /"[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*/g;
const LARGE = /^-?\d{16,}$/;
const MARK = `\u0001${Math.random()} `; // in front of the digits while they are a string

export function parsed<T>(text: string): T {
  const marked = text.replace(TOKENS, (token) => (LARGE.test(token) ? JSON.stringify(MARK + token) : token));
  return JSON.parse(marked, (_, value: unknown) => (typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value)) as T;
}

export function written(value: unknown): string {
  const quoted = JSON.stringify(MARK).slice(0, -1); // as it stands in JSON, behind the opening quote
  const text = JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? `${MARK}${each}` : each));
  return text.includes(quoted) ? text.split(quoted).map((part, i) => (i ? part.replace('"', "") : part)).join("") : text;
}
