/** Numbers and times as people read them. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${number(value)} ${units[unit]}`;
}

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${number(value, 2)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 48 * 3600 ? `${number(value / 3600, 2)} h` : `${Math.round(value / 86400)} d`;
}

/** From one time to another, in words. */
export function lasting(from: string | null, to: string | null): string {
  return from === null || to === null ? "–" : seconds(Math.max(0, Date.parse(to) - Date.parse(from)) / 1000);
}

export function ago(time: string | number | null): string {
  if (time === null) return "–";
  const past = (Date.now() - new Date(time).getTime()) / 1000;
  return past < 5 ? "just now" : `${seconds(past)} ago`;
}

export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
}

const IMAGE = /<img>(?:<IMG_CONTEXT>|\[image\])<\/img>/g; // as a template may write one

/** A prompt as one line of a list: the last turn, without the template's own tokens. */
export function lastTurn(prompt: string): string {
  const turns = prompt.replace(IMAGE, "[image] ").split(/<\|[^|<>]*\|>/).map((turn) => turn.replace(/^(user|assistant|system|tool)\n/, "").trim());
  return turns.findLast((turn) => turn !== "" && turn !== "assistant") ?? prompt.trim();
}

/** A job's id, short enough to read out. */
export function short(id: string): string {
  return id.slice(0, 8);
}
