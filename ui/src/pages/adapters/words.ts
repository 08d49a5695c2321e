/** Two texts word by word: what both have, what only one has (longest common subsequence). */
export interface Piece {
  text: string;
  kind: "both" | "one" | "other";
}

const MOST_CELLS = 4_000_000;

export function difference(one: string, other: string): Piece[] {
  const [a, b] = [words(one), words(other)];
  if (a.length * b.length > MOST_CELLS) return [{ text: one, kind: "one" }, { text: other, kind: "other" }];
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const best = a[i] === b[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
      longest[i * width + j] = best;
    }
  }
  const pieces: Piece[] = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add("both", a[i++] ?? "");
      j += 1;
    } else if (j >= b.length || (i < a.length && at(i + 1, j) >= at(i, j + 1))) add("one", a[i++] ?? "");
    else add("other", b[j++] ?? "");
  }
  return pieces;

  function at(row: number, column: number): number {
    return longest[row * width + column] ?? 0;
  }
  function add(kind: Piece["kind"], text: string): void {
    const last = pieces.at(-1);
    if (last?.kind === kind) last.text += text;
    else pieces.push({ text, kind });
  }
}

function words(text: string): string[] {
  return text.match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];
}
