/** Conversations with one version or two: each keeps its own history, and what is typed goes to all of them. */
import type { Message, Said } from "../../api/chat";
import { stream } from "../../api/chat";
import { content, type Given } from "../../api/pictures";

const STORED = "groupwise.chat";

export interface Turn {
  role: "user" | "assistant";
  content: string;
  /** What a person showed with it. */
  pictures?: Given[];
  /** What it wrote in <think> before; it is not sent back. */
  thought?: string;
  /** Which version answered; "" for what a person wrote. */
  version: string;
  /** What the server calls the answer, once it is whole. */
  id?: string;
  /** Why it ended: "stop", "length", or "stopped" by hand; null while it is written, or of a person. */
  finish: string | null;
}

export class Thread {
  version = $state("");
  turns = $state<Turn[]>([]);
  busy = $state(false);
  error = $state<unknown>(null);

  private stop: AbortController | null = null;

  constructor(version: string, turns: Turn[] = []) {
    this.version = version;
    this.turns = turns;
  }

  cancel(): void {
    this.stop?.abort();
  }

  /** Say something; from `at` on what was said before is replaced. */
  say(text: string, pictures: Given[], at = this.turns.length): void {
    this.cancel();
    this.turns = [...this.turns.slice(0, at), { role: "user", content: text, pictures, version: "", finish: null }];
    void this.answer();
  }

  /** Another answer to what was said last, by the version that is chosen now. */
  regenerate(): void {
    this.cancel();
    this.turns = this.turns.slice(0, this.turns.findLastIndex((turn) => turn.role === "user") + 1);
    void this.answer();
  }

  private async answer(): Promise<void> {
    const stop = (this.stop = new AbortController());
    const history: Message[] = this.turns.map((turn) => ({ role: turn.role, content: content(turn.content, turn.pictures) }));
    const messages = chat.system.trim() ? [{ role: "system", content: chat.system }, ...history] : history;
    this.turns.push({ role: "assistant", content: "", version: this.version, finish: null });
    const turn = this.turns.at(-1);
    const said = $state<Said[]>([{ thought: "", text: "", tokens: [], finish: null }]);
    const show = (): void => {
      if (!turn || !said[0]) return;
      turn.content = said[0].text;
      turn.thought = said[0].thought;
    };
    let id: string | undefined;
    this.error = null;
    this.busy = true;
    const timer = setInterval(show, 50);
    try {
      const { temperature, maxTokens } = chat;
      const asked = { model: this.version, messages, n: 1, temperature, maxTokens, seed: null };
      await stream(asked, said, { signal: stop.signal, version: (version) => turn && (turn.version = version), id: (told) => (id = told) });
      if (turn) Object.assign(turn, { finish: said[0]?.finish ?? "stop", id });
    } catch (problem) {
      if (turn) turn.finish = "stopped";
      if (!stop.signal.aborted) this.error = problem;
    } finally {
      clearInterval(timer);
      show();
      if (this.stop === stop) this.busy = false;
      chat.keep();
    }
  }
}

class Chat {
  threads = $state<Thread[]>([]);
  system = $state("");
  temperature = $state(0.7);
  maxTokens = $state(256);
  draft = $state("");
  pictures = $state.raw<Given[]>([]);

  constructor() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(STORED) ?? "{}") as { threads?: { version: string; turns: Turn[] }[]; system?: string };
      this.threads = (kept.threads ?? []).map((each) => new Thread(each.version, each.turns));
      this.system = kept.system ?? "";
    } catch {
      this.threads = [];
    }
  }

  /** Until the tab is closed. */
  keep(): void {
    try {
      const threads = this.threads.map(({ version, turns }) => ({ version, turns }));
      sessionStorage.setItem(STORED, JSON.stringify({ threads, system: this.system }));
    } catch {
      sessionStorage.removeItem(STORED); // too large, as with photographs: it is here until the page is closed
    }
  }

  clear(): void {
    for (const thread of this.threads) {
      thread.cancel();
      thread.turns = [];
      thread.error = null;
    }
    this.keep();
  }
}

export const chat = new Chat();
