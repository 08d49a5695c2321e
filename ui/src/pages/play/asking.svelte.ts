/** What the playground asks, and who: kept while one looks at other pages. */
import type { Message, Said } from "../../api/chat";
import { messages, stream } from "../../api/chat";
import type { Given } from "../../api/pictures";

export class Column {
  version = $state("");
  said = $state<Said[]>([]);
  answeredBy = $state("");
  error = $state<unknown>(null);
  busy = $state(false);

  private stop: AbortController | null = null;

  constructor(version: string) {
    this.version = version;
  }

  cancel(): void {
    this.stop?.abort();
  }

  async ask(question: Question): Promise<void> {
    this.cancel();
    const stop = (this.stop = new AbortController());
    this.said = Array.from({ length: question.n }, () => ({ thought: "", text: "", tokens: [], finish: null }));
    this.error = null;
    this.answeredBy = "";
    this.busy = true;
    try {
      await stream({ ...question.plain(), model: this.version }, this.said, {
        signal: stop.signal,
        version: (version) => (this.answeredBy = version),
      });
    } catch (problem) {
      if (!stop.signal.aborted) this.error = problem;
    } finally {
      if (this.stop === stop) this.busy = false;
    }
  }
}

export class Question {
  prompt = $state("");
  system = $state("");
  pictures = $state.raw<Given[]>([]);
  n = $state(2);
  temperature = $state(1);
  maxTokens = $state(128);
  seed = $state<number | null>(7);

  plain(): { messages: Message[]; n: number; temperature: number; maxTokens: number; seed: number | null } {
    const { n, temperature, maxTokens, seed } = this;
    return { messages: messages(this), n, temperature, maxTokens, seed };
  }
}

export const question = new Question();
export const columns = $state<Column[]>([]);
export const MOST_COLUMNS = 4;
