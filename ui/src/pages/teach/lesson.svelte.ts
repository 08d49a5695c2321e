/** A lesson: prompts, what was sampled of them and how it was scored, the job that learns, and what it changed.
 *
 * All of it is kept in the browser's localStorage as it changes, so that a reload loses nothing. What is sampled comes
 * from the version that training starts from, and that version is always named to the server. */
import { get, post, segment } from "../../api/http";
import { content, type Given } from "../../api/pictures";
import type { BatchAnswer, BatchCompletion, JobMetrics, TrainStatus, TrainSubmitted } from "../../api/types";
import { server } from "../../state/server.svelte";
import type { ExampleTask } from "./examples";
import { checked, type Check, compiled, heldOut, mean, type Vote, won } from "./scoring";

const STORED = "groupwise.teach";
const STARTER = "starter";
const SAVE_MS = 300;
const HELD_SEED = 1_000_003; // the held-out prompts are always asked with this seed, before and after
const MOST_COMPLETIONS = 512; // in one request

export interface Item {
  text: string;
  answer: string;
  /** Held out: evaluated before and after, not taught. */
  held: boolean;
  pictures?: Given[];
}

export interface Example {
  rollout: string;
  text: string;
  finish: string;
  /** What a person gave, 0 to 1; null: nothing; "out": left out. */
  score: number | "out" | null;
}

export interface Group {
  prompt: string;
  pictures?: Given[];
  answer: string;
  version: string;
  examples: Example[];
  votes: Vote[];
}

/** The held-out prompts as a version answers them. */
export interface Evaluation {
  version: string;
  prompts: { text: string; answer: string; pictures?: Given[]; said: string[] }[];
}

export interface Round {
  from: string;
  version: string;
  job: string;
  /** Mean reward of what was trained on; shares of the held-out prompts before and after; the largest KL of a step. */
  reward: number | null;
  before: number | null;
  after: number | null;
  kl: number | null;
  steps: number;
}

export type Stage = "score" | "train" | "done";
export type By = "answer" | "thumbs" | "number" | "pairs";

interface Kept {
  items: Item[];
  system: string;
  n: number;
  maxTokens: number;
  by: By;
  check: Check;
  pattern: string;
  from: string;
  name: string;
  rate: number | null;
  passes: number;
  kl: number;
  groups: Group[];
  stage: Stage;
  job: string | null;
  before: Evaluation | null;
  after: Evaluation | null;
  next: Group[];
  rounds: Round[];
  seed: number;
}

const isAsked = (item: Item): boolean => item.text.trim() !== "" || Boolean(item.pictures?.length);
const fresh = (): Kept => ({
  items: [{ text: "", answer: "", held: false }], system: "", n: 8, maxTokens: 64, by: "thumbs", check: "number", pattern: "",
  from: "", name: "taught", rate: null, passes: 8, kl: 0.1,
  groups: [], stage: "score", job: null, before: null, after: null, next: [], rounds: [], seed: 1,
});

class Lesson {
  now = $state<Kept>(restored());
  /** What is going on: "sampling", "submitting", "answering". */
  busy = $state("");
  error = $state<unknown>(null);
  /** Whether the browser keeps it. */
  isKept = $state(true);

  private stop: AbortController | null = null;

  readonly regex = $derived.by(() => compiled(this.now.pattern));
  readonly from = $derived(this.now.from || server.active);
  readonly taught = $derived(this.now.items.filter((item) => isAsked(item) && !item.held));
  readonly held = $derived(this.now.items.filter((item) => isAsked(item) && item.held));
  readonly flat = $derived(this.now.groups.flatMap((group) => group.examples.map((example, i) => ({ group, example, i }))));
  readonly rewards = $derived(new Map(this.flat.map(({ group, example, i }) => [example.rollout, this.rewardOf(group, example, i)])));
  readonly scored = $derived(this.flat.filter(({ example }) => this.rewards.get(example.rollout) !== null));
  /** Groups in which at least two scores differ. */
  readonly teaching = $derived(this.now.groups.filter((group) => new Set(this.known(group)).size > 1));
  /** Groups in which two completions at least are scored: all of them are posted, so that the job's mean reward is this page's. */
  readonly comparable = $derived(this.now.groups.filter((group) => this.known(group).length > 1));
  /** Versions that sampled what is to be trained, other than the one that training starts from. */
  readonly strangers = $derived([...new Set(this.now.groups.map((group) => group.version))].filter((version) => version !== this.from));
  /** Without better knowledge: docs/server.md, "The learning rate". */
  readonly usualRate = $derived(server.config?.config["model"] === STARTER ? 1e-3 : 1e-5);
  readonly warmup = $derived(Math.min(2, Math.max(0, this.now.passes - 1)));

  constructor() {
    $effect.root(() => {
      $effect(() => {
        const text = JSON.stringify(this.now);
        const timer = setTimeout(() => (this.isKept = keep(text)), SAVE_MS);
        const hurry = (): void => void keep(text);
        window.addEventListener("pagehide", hurry);
        return () => {
          clearTimeout(timer);
          window.removeEventListener("pagehide", hurry);
        };
      });
    });
  }

  private rewardOf(group: Group, example: Example, i: number): number | null {
    if (example.score === "out") return null;
    if (example.score !== null) return example.score;
    const compared = won(group.votes, group.examples.length)[i] ?? null;
    return compared ?? checked(example.text, group.answer, this.now.check, this.regex.regex);
  }

  private known(group: Group): number[] {
    return group.examples.map((each) => this.rewards.get(each.rollout) ?? null).filter((each) => each !== null);
  }

  /** The share of a set of held-out answers that is right; null without answers to compare with. */
  share(evaluation: Evaluation | null): number | null {
    if (!evaluation) return null;
    const { check } = this.now;
    return mean(evaluation.prompts.flatMap((each) => each.said.map((text) => checked(text, each.answer, check, this.regex.regex))));
  }

  begin(task: ExampleTask): void {
    const held = heldOut(task.prompts.length, 0.5);
    const { name, from, rate, passes, kl } = this.now;
    const items = task.prompts.map((prompt, i) => ({ ...prompt, held: held[i] ?? false }));
    this.now = { ...fresh(), name, from, rate, passes, kl, items, check: task.check, pattern: task.pattern ?? "", by: task.by };
    this.error = null;
  }

  add(prompts: { text: string; answer: string; pictures?: Given[] }[]): void {
    const given = this.now.items.filter(isAsked);
    this.now.items = [...given, ...prompts.map((prompt) => ({ ...prompt, held: false }))];
  }

  holdOut(share: number): void {
    const held = heldOut(this.now.items.length, share);
    this.now.items = this.now.items.map((item, i) => ({ ...item, held: held[i] ?? false }));
  }

  async sample(): Promise<void> {
    await this.during("sampling", async (signal) => {
      const version = this.from;
      if (this.now.before?.version !== version) this.now.before = await this.evaluate(version, signal);
      const groups = await this.groups(version, signal);
      this.now = { ...this.now, groups, from: version, stage: "score", job: null, after: null, next: [] };
    });
  }

  async train(): Promise<void> {
    await this.during("submitting", async () => {
      const groups = this.comparable.map((group) => ({
        completions: group.examples.flatMap((each) => {
          const reward = this.rewards.get(each.rollout) ?? null;
          return reward === null ? [] : [{ rollout_id: each.rollout, reward }];
        }),
      }));
      const { name, rate, passes, kl } = this.now;
      const config = {
        output_name: name.trim(), base_adapter: this.from, learning_rate: rate ?? this.usualRate,
        iterations: passes, warmup_steps: this.warmup, kl_coeff: kl,
      };
      const sent = await post<TrainSubmitted>("v1/train/grpo", { groups, config });
      this.now.after = null;
      this.now.job = sent.job_id;
      server.merge([await get<TrainStatus>(`v1/train/status/${segment(sent.job_id)}`)]);
      this.now.stage = "train";
    });
  }

  /** Everything once more, by the version that the job made. */
  async look(job: TrainStatus): Promise<void> {
    const version = job.adapter_version;
    if (!version || this.now.job !== job.job_id) return;
    await this.during("answering", async (signal) => {
      const after = await this.evaluate(version, signal);
      const next = await this.groups(version, signal);
      const { steps } = await get<JobMetrics>(`v1/train/metrics/${segment(job.job_id)}`, {}, signal);
      const kls = steps.map((step) => step["kl/mean"] as unknown).filter((each) => typeof each === "number");
      const round: Round = {
        from: this.from, version, job: job.job_id, steps: steps.length, kl: kls.length ? Math.max(...kls) : null,
        reward: mean(this.scored.map(({ example }) => this.rewards.get(example.rollout) ?? null)),
        before: this.share(this.now.before), after: this.share(after),
      };
      this.now = { ...this.now, after, next, rounds: [...this.now.rounds, round], stage: "done" };
    });
  }

  /** Score what the new version said: the next round starts from it. */
  goOn(): void {
    const { after, next } = this.now;
    const from = next[0]?.version ?? this.now.from;
    this.now = { ...this.now, from, groups: next, next: [], before: after, after: null, job: null, stage: "score" };
    this.error = null;
  }

  /** The prompts stay; what was sampled, scored and trained is forgotten here. */
  startOver(): void {
    this.now = { ...this.now, from: "", groups: [], next: [], before: null, after: null, job: null, rounds: [], stage: "score" };
    this.error = null;
  }

  clear(): void {
    this.now = fresh();
    this.error = null;
  }

  cancel(): void {
    this.stop?.abort();
  }

  private async evaluate(version: string, signal: AbortSignal): Promise<Evaluation | null> {
    if (!this.held.length) return null;
    const said = await this.ask(this.held, version, HELD_SEED, signal);
    return { version, prompts: this.held.map(({ text, answer, pictures }, i) => ({ text, answer, pictures, said: (said[i] ?? []).map((each) => each.text) })) };
  }

  private async groups(version: string, signal: AbortSignal): Promise<Group[]> {
    this.now.seed += 1;
    const taught = this.taught;
    const said = await this.ask(taught, version, this.now.seed, signal);
    return taught.map(({ text, answer, pictures }, i) => ({
      prompt: text, answer, pictures, version: said[i]?.[0]?.adapter ?? version, votes: [],
      examples: (said[i] ?? []).map((each) => ({ rollout: each.rollout_id, text: each.text, finish: each.finish_reason, score: null })),
    }));
  }

  /** The completions of each prompt. */
  private async ask(items: Item[], adapter: string, seed: number, signal: AbortSignal): Promise<BatchCompletion[][]> {
    const { n, maxTokens, system } = this.now;
    const at = Math.max(1, Math.floor(MOST_COMPLETIONS / n));
    const found: BatchCompletion[][] = [];
    for (let begin = 0; begin < items.length; begin += at) {
      const some = items.slice(begin, begin + at);
      const prompts = some.map(({ text, pictures }) => [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: content(text, pictures) }]);
      const body = { prompts, n, max_tokens: maxTokens, adapter, seed: seed + begin };
      const { completions } = await post<BatchAnswer>("v1/completions/batch", body, { signal });
      found.push(...some.map((_, i) => completions.filter((each) => each.prompt_index === i)));
    }
    return found;
  }

  private async during(what: string, work: (signal: AbortSignal) => Promise<void>): Promise<void> {
    const stop = (this.stop = new AbortController());
    this.busy = what;
    this.error = null;
    try {
      await work(stop.signal);
    } catch (problem) {
      if (!stop.signal.aborted) this.error = problem;
    } finally {
      this.busy = "";
    }
  }
}

function restored(): Kept {
  try {
    const text = localStorage.getItem(STORED);
    const kept = text ? (JSON.parse(text) as Partial<Kept>) : {};
    const whole = { ...fresh(), ...kept };
    return Array.isArray(whole.items) && Array.isArray(whole.groups) && Array.isArray(whole.rounds) ? whole : fresh();
  } catch {
    return fresh();
  }
}

function keep(text: string): boolean {
  try {
    localStorage.setItem(STORED, text);
    return true;
  } catch {
    return false;
  }
}

export const lesson = new Lesson();
