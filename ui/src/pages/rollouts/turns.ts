/** An episode's turns and messages, each with the place of its first token. */
import type { RunRollout } from "../../api/types";

export type Turn = RunRollout["parts"][number] & { from: number };

export function turns(parts: RunRollout["parts"]): Turn[] {
  let from = 0;
  return parts.map((part) => {
    const turn = { ...part, from };
    from += part.tokens;
    return turn;
  });
}
