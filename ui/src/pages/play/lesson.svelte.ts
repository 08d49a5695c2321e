/** A lesson: groups that were sampled, their scores, the job that learns from them, and what is said afterwards. */
import { messages } from "../../api/chat";
import { get, post, segment } from "../../api/http";
import type { BatchAnswer, TrainStatus, TrainSubmitted } from "../../api/types";
import { server } from "../../state/server.svelte";

export const MOST_SCORE = 5; // keys 0 to 5; what is posted is 0 to 1
const STARTER = "starter";

export interface Example {
  rollout: string;
  text: string;
  finish: string;
  /** 0 to MOST_SCORE; null: not scored yet; "out": left out. */
  score: number | "out" | null;
}

export interface Group {
  prompt: string;
  system: string;
  version: string;
  examples: Example[];
}

export interface Answers {
  version: string;
  texts: string[];
}

type Stage = "score" | "train" | "done";

class Lesson {
  prompt = $state("");
  system = $state("");
  n = $state(8);
  maxTokens = $state(64);
  groups = $state<Group[]>([]);
  by = $state<"hand" | "pattern">("hand");
  pattern = $state("");
  name = $state("taught");
  rate = $state<number | null>(null);
  passes = $state(4);
  stage = $state<Stage>("score");
  job = $state<string | null>(null);
  before = $state<Answers | null>(null);
  after = $state<Answers | null>(null);
  /** What is going on: "sampling", "submitting", "answering". */
  busy = $state("");
  error = $state<unknown>(null);
  seed = 1;

  readonly regex = $derived.by(() => compiled(this.pattern));
  readonly flat = $derived(this.groups.flatMap((group) => group.examples));
  readonly scored = $derived(this.flat.filter((example) => this.reward(example) !== null));
  /** Groups in which at least two scores differ. */
  readonly teaching = $derived(
    this.groups.filter((group) => {
      const rewards = group.examples.map((each) => this.reward(each)).filter((each) => each !== null);
      return new Set(rewards).size > 1;
    }),
  );
  /** What a job of this model should be told if one does not know better: docs/server.md, "The learning rate". */
  readonly usualRate = $derived(server.config?.config["model"] === STARTER ? 3e-3 : 1e-5);

  /** 0 to 1, or null for what is not trained on. */
  reward(example: Example): number | null {
    if (example.score === "out") return null;
    if (this.by === "hand") return example.score === null ? null : example.score / MOST_SCORE;
    const { regex } = this.regex;
    return regex ? Number(regex.test(example.text)) : null;
  }

  async sample(): Promise<void> {
    await this.during("sampling", async () => {
      const { prompt, system } = this;
      const answer = await this.ask(prompt, system, null);
      const examples = answer.completions.map((each): Example => {
        return { rollout: each.rollout_id, text: each.text, finish: each.finish_reason, score: null };
      });
      this.groups.push({ prompt, system, version: answer.completions[0]?.adapter ?? "", examples });
      this.stage = "score";
    });
  }

  async train(): Promise<void> {
    await this.during("submitting", async () => {
      const groups = this.teaching.map((group) => ({
        completions: group.examples.flatMap((each) => {
          const reward = this.reward(each);
          return reward === null ? [] : [{ rollout_id: each.rollout, reward }];
        }),
      }));
      const config = { output_name: this.name.trim(), learning_rate: this.rate ?? this.usualRate, iterations: this.passes };
      const sent = await post<TrainSubmitted>("v1/train/grpo", { groups, config });
      const first = this.teaching[0];
      this.before = first ? { version: first.version, texts: first.examples.map((each) => each.text) } : null;
      this.after = null;
      this.job = sent.job_id;
      server.merge([await get<TrainStatus>(`v1/train/status/${segment(sent.job_id)}`)]);
      this.stage = "train";
    });
  }

  /** The first prompt once more, by the version that the job made. */
  async look(version: string): Promise<void> {
    await this.during("answering", async () => {
      const first = this.teaching[0] ?? this.groups[0];
      if (!first) return;
      const answer = await this.ask(first.prompt, first.system, version);
      this.after = { version, texts: answer.completions.map((each) => each.text) };
      this.stage = "done";
      this.next = {
        prompt: first.prompt, system: first.system, version,
        examples: answer.completions.map((each) => ({ rollout: each.rollout_id, text: each.text, finish: each.finish_reason, score: null })),
      };
    });
  }

  /** Score what the new version said: the next round. */
  goOn(): void {
    this.groups = this.next ? [this.next] : [];
    this.clear();
  }

  startOver(): void {
    this.groups = [];
    this.clear();
  }

  private next: Group | null = null;

  private clear(): void {
    this.job = this.before = this.after = this.next = null;
    this.error = null;
    this.stage = "score";
  }

  private ask(prompt: string, system: string, adapter: string | null): Promise<BatchAnswer> {
    const body = { prompts: [messages({ prompt, system })], n: this.n, max_tokens: this.maxTokens, adapter, seed: (this.seed += 1) };
    return post<BatchAnswer>("v1/completions/batch", body);
  }

  private async during(what: string, work: () => Promise<void>): Promise<void> {
    this.busy = what;
    this.error = null;
    try {
      await work();
    } catch (problem) {
      this.error = problem;
    } finally {
      this.busy = "";
    }
  }
}

function compiled(pattern: string): { regex: RegExp | null; problem: string } {
  if (!pattern) return { regex: null, problem: "" };
  try {
    return { regex: new RegExp(pattern, "u"), problem: "" };
  } catch (error) {
    return { regex: null, problem: (error as Error).message };
  }
}

export const lesson = new Lesson();
