/** What the palette offers, and how what was typed picks from it. */
export interface Command {
  name: string;
  kind: string;
  run: () => void;
}

/** Commands whose name has the words typed, each as letters in order; those that have them as they are come first. */
export function matching<T extends { name: string; kind: string }>(commands: T[], typed: string, most: number): T[] {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  const found: { command: T; cost: number }[] = [];
  for (const command of commands) {
    const text = `${command.kind} ${command.name}`.toLowerCase();
    const costs = words.map((word) => cost(text, word));
    if (costs.every((each) => each !== null)) found.push({ command, cost: costs.reduce<number>((sum, each) => sum + (each ?? 0), 0) });
  }
  return found.sort((a, b) => a.cost - b.cost).slice(0, most).map((each) => each.command);
}

function cost(text: string, word: string): number | null {
  const whole = text.indexOf(word);
  if (whole >= 0) return whole === 0 || text[whole - 1] === " " ? 0 : 1;
  let at = -1;
  let gaps = 2;
  for (const letter of word) {
    const next = text.indexOf(letter, at + 1);
    if (next < 0) return null;
    gaps += at < 0 ? 0 : next - at - 1;
    at = next;
  }
  return gaps;
}
