/** The pages' own arithmetic, as Vite would serve it: words that changed, seeds as a band, which metrics are drawn. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { createServer } from "vite";

let vite;
before(async () => {
  vite = await createServer({ root: new URL("..", import.meta.url).pathname, server: { middlewareMode: true, hmr: false, ws: false }, logLevel: "error" });
});
after(() => vite.close());
const load = (path) => vite.ssrLoadModule(`/src/${path}`);

test("a difference joins to both texts, word by word", async () => {
  const { difference } = await load("pages/adapters/words.ts");
  const side = (pieces, kind) => pieces.filter((piece) => piece.kind === "both" || piece.kind === kind).map((piece) => piece.text).join("");
  const texts = ["", "85", "The answer is 85.", "The sum is 185, I think", "7+8=15\n4+3+1=8", "好 85 😀", "  "];
  for (const one of texts) {
    for (const other of texts) {
      const pieces = difference(one, other);
      assert.equal(side(pieces, "one"), one);
      assert.equal(side(pieces, "other"), other);
      assert.equal(pieces.every((piece) => piece.kind === "both"), one === other);
      assert.ok(pieces.every((piece, i) => piece.kind !== pieces[i - 1]?.kind), "neighbours of one kind are one piece");
    }
  }
  assert.deepEqual(difference("The answer is 85.", "The answer is 95."), [
    { text: "The answer is ", kind: "both" }, { text: "85", kind: "one" }, { text: "95", kind: "other" }, { text: ".", kind: "both" },
  ]);
});

test("texts too long to compare are shown whole, one after the other", async () => {
  const { difference } = await load("pages/adapters/words.ts");
  const long = "word ".repeat(2000);
  assert.deepEqual(difference(long, `${long}!`), [{ text: long, kind: "one" }, { text: `${long}!`, kind: "other" }]);
});

const run = (id, seed, rate, rewards) => ({
  id, name: id, config: { seed, rate, name: id, run_dir: `/runs/${id}`, "tracking.wandb": null },
  steps: rewards.map((reward, i) => ({ step: i + 1, "reward/mean": reward })),
});

test("runs that differ only in the seed are one curve with a band", async () => {
  const { allSteps, curves, families } = await load("pages/jobs/bands.ts");
  const runs = [run("math-s0", 0, 1, [0, 0.25, 1]), run("math-s1", 1, 1, [0.5, 0.75]), run("fast-s0", 0, 2, [1, 1, 1])];
  assert.deepEqual(families(runs).map((family) => family.map((each) => each.id)), [["math-s0", "math-s1"], ["fast-s0"]]);
  const x = allSteps(runs);
  assert.deepEqual(x, [1, 2, 3]);
  const [band, single, ...more] = curves(runs, "reward/mean", x, "range");
  assert.deepEqual(band, { label: "math (2 seeds)", values: [0.25, 0.5, null], low: [0, 0.25, null], high: [0.5, 0.75, null] });
  assert.deepEqual(single, { label: "fast-s0", values: [1, 1, 1] });
  assert.deepEqual(more, []);
  const [wide] = curves(runs, "reward/mean", x, "std"); // of 0 and 0.5: sqrt(2) * 0.25
  assert.ok(Math.abs(wide.high[0] - (0.25 + Math.SQRT2 / 4)) < 1e-12 && Math.abs(wide.low[0] - (0.25 - Math.SQRT2 / 4)) < 1e-12);
  assert.equal(curves(runs, "reward/mean", x, "each").length, 3);
});

test("the same seed twice is no sample of seeds", async () => {
  const { families } = await load("pages/jobs/bands.ts");
  assert.equal(families([run("a1", 0, 1, []), run("a2", 0, 1, [])]).length, 2);
  assert.equal(families([run("a", 0, 1, []), run("a2", 1, 3, [])]).length, 2);
});

test("names count without their numbers", async () => {
  const { families } = await load("pages/jobs/bands.ts");
  const runs = [run("lr-seed-0", 0, 1, []), run("lr-seed-1", 1, 1, []), run("shuffled", 0, 1, [])];
  assert.deepEqual(families(runs).map((family) => family.length), [2, 1]);
});

test("each reward function has its curve, and what is no mean of one has none there", async () => {
  const { panels, shortName } = await load("pages/jobs/curves.ts");
  const step = { step: 1, "reward/mean": 1, "reward/std": 0, "reward/max": 1, "reward/exact/mean": 1, "reward/exact/std": 0, "reward/brief/mean": 0, "reward/brief/failed": 2, "eval/greedy/reward": 1, "eval/greedy/add/reward": 1 };
  const by = Object.fromEntries(panels([step]).map((panel) => [panel.title, panel.metrics]));
  assert.deepEqual(by["Reward"], ["reward/mean"]);
  assert.deepEqual(by["Rewards by function"], ["reward/brief/mean", "reward/exact/mean"]);
  assert.deepEqual(by["Held-out reward"], ["eval/greedy/reward"]);
  assert.equal(shortName("reward/exact/mean"), "exact");
  assert.equal(shortName("loss/clip_frac_low"), "clip_frac_low");
});

test("training and evaluation of a step are one record, and a step that is run again counts as it was last", async () => {
  const { merged } = await load("state/steps.ts");
  const first = merged([], [{ step: 1, loss: 3 }, { step: 2, loss: 2 }, { step: 2, held: 5 }]);
  assert.deepEqual(first, [{ step: 1, loss: 3 }, { step: 2, loss: 2, held: 5 }]);
  assert.deepEqual(merged(first, [{ step: 2, loss: 1 }, { step: 3, loss: 0 }])[1], { step: 2, loss: 1, held: 5 });
});

test("metrics that no panel draws have a panel of their own, as far as they change", async () => {
  const { others } = await load("pages/jobs/curves.ts");
  const steps = [1, 2].map((step) => ({ step, time: `t${step}`, "reward/mean": step, "mine/speed": 1 / step, "mine/same": 3, "mine/twin": step, "eval/greedy/add/reward": step - 1 }));
  const { drawn, said } = others(steps);
  assert.deepEqual(drawn.map((panel) => panel.metrics), [["eval/greedy/add/reward"], ["mine/speed"]]);
  assert.deepEqual(said.map((each) => [each.metric, each.value, each.why]), [["mine/same", "3", "throughout"], ["mine/twin", "", "the same as reward/mean"]]);
});

test("evaluations are a row a mode and column, with the error of the last", async () => {
  const { evaluated, signed } = await load("pages/run/evaluations.ts");
  const at = (step, value) => ({ step, "eval/greedy/reward": value, "eval/greedy/add/reward": 1, "eval/greedy/reward_stderr": value / 10, "eval/greedy/failed": 0 });
  const [all, add, ...more] = evaluated([at(0, 0.5), { step: 1, "reward/mean": 1 }, at(2, 1), { ...at(4, 0.75), "eval/greedy/add/reward": null }]);
  assert.deepEqual(all, { name: "greedy", first: { step: 0, value: 0.5 }, last: { step: 4, value: 0.75 }, best: { step: 2, value: 1 }, error: 0.075 });
  assert.deepEqual([add.name, add.last.step, add.error, more], ["greedy, add", 2, null, []]);
  assert.deepEqual([signed(0.25, String), signed(-1, String), signed(0, String)], ["+0.25", "-1", "0"]);
  assert.deepEqual(evaluated([{ ...at(1, 1), "eval/greedy/failed": 2 }]).at(-1).name, "greedy, failed");
});

test("a report answers as `groupwise ui` would", async () => {
  const { answered } = await load("api/saved.ts");
  const rollout = (id, reward, text) => ({ id, group: id.slice(0, 3), prompt: "", text, reward, finish_reason: "stop", version: "toy@1", tokens: [text], token_ids: [], logprobs: [-1] });
  const group = (id, ...rollouts) => ({ group: id, prompt: "p".repeat(500), columns: { skill: id === "1.0" ? "sub" : "add" }, rollouts });
  const one = {
    detail: { run: "a~b", config: { seed: 1, x: 2 } }, steps: [{ step: 1 }], health: { status: "ok" }, evaluations: { mode: null }, left_out: [],
    groups: [group("2.0", rollout("2.0.1", 1, "yes"), rollout("2.0.0", 0, "no")), group("1.0", rollout("1.0.0", null, "yes"))],
  };
  const report = { written: "", definitions: [{ metric: "reward/mean" }], runs: [one, { ...one, detail: { run: "c", config: { seed: 2, x: 2 } } }] };
  const ask = (path, query = "") => answered(report, path, new URLSearchParams(query));
  const ids = async (query) => (await ask("v1/runs/a~b/rollouts", query).json()).rows.map((row) => row.id);
  assert.deepEqual((await ask("v1/runs").json()).runs.length, 2);
  assert.deepEqual(await ask("v1/runs/a~b").json(), one.detail);
  assert.deepEqual((await ask("v1/metrics/definitions").json()).definitions, [{ metric: "reward/mean" }]);
  assert.deepEqual((await ask("v1/diff?run=a~b&run=c", "run=a~b&run=c").json()).differs, ["seed"]);
  assert.deepEqual((await ask("v1/runs/a~b/metrics").json()).steps, [{ step: 1 }]);
  assert.deepEqual((await ask("v1/runs/a~b/metrics", "after=end").json()).steps, []);
  assert.match(await ask("v1/events/a~b").text(), /^id: end\ndata: \{"run":"a~b","steps":\[\{"step":1\}\]/);
  assert.equal(ask("v1/events/a~b", "after=end").status, 204);
  assert.deepEqual(await ids(""), ["2.0.0", "2.0.1", "1.0.0"]);
  assert.deepEqual(await ids("step=2&contains=ye"), ["2.0.1"]);
  assert.deepEqual(await ids("reward_min=0&reward_max=0.5"), ["2.0.0"]);
  assert.deepEqual(await ids("finish_reason=length"), []);
  assert.deepEqual(await ids("contains=YES"), ["2.0.1", "1.0.0"]);
  assert.deepEqual((await ids("contains=PPP")).length, 3);
  assert.deepEqual(await ids("sort=best"), ["2.0.1", "2.0.0", "1.0.0"]);
  assert.deepEqual(await ids("tag=skill=sub"), ["1.0.0"]);
  const facets = await ask("v1/runs/a~b/rollouts/facets").json();
  assert.deepEqual([facets.counted, facets.steps, facets.versions], [3, [2, 1], [{ value: "toy@1", count: 3 }]]);
  assert.deepEqual(facets.tags.skill, [{ value: "add", count: 2 }, { value: "sub", count: 1 }]);
  assert.equal((await ask("v1/runs/a~b/rollouts").json()).rows[0].prompt.length, 400);
  assert.equal((await ask("v1/runs/a~b/rollouts/2.0.1").json()).group, "2.0");
  for (const path of ["v1/runs/none", "v1/runs/c/rollouts/9.9.9", "v1/runs/c/checkpoints"]) {
    const answer = ask(path);
    assert.equal(answer.status, 404);
    assert.ok((await answer.json()).error.hint.includes("groupwise ui"));
  }
});

const alike = (values, metric = "reward/mean") => values.map((value, i) => ({ step: i + 1, [metric]: value }));

test("an axis has labels that differ, however near its ticks are", async () => {
  const { tickLabels } = await load("parts/curve.ts");
  assert.deepEqual(tickLabels([0.999, 0.9995, 1]), ["0.9990", "0.9995", "1.0000"]);
  assert.deepEqual(tickLabels([0, 0.5, 1]), ["0", "0.5", "1.0"]);
  assert.deepEqual(tickLabels([0, 2000, 4000]), ["0", "2,000", "4,000"]);
  assert.deepEqual(tickLabels([1e-7, null, 3e-7]), ["1e-7", "", "3e-7"]);
  for (const from of [0, 0.99999, 12345, 1e-5, 2e6, -3]) {
    for (const gap of [1e-6, 1e-3, 0.25, 7]) {
      const ticks = Array.from({ length: 6 }, (_, i) => from + i * gap * Math.max(1, Math.abs(from) * 1e-3));
      assert.equal(new Set(tickLabels(ticks)).size, 6, `${ticks}: ${tickLabels(ticks)}`);
    }
  }
});

test("smoothing keeps a constant, follows a step, and invents nothing where there is no value", async () => {
  const { smoothed } = await load("parts/curve.ts");
  const near = (found, wanted) => found.forEach((value, i) => assert.ok(value === wanted[i] || Math.abs(value - wanted[i]) < 1e-12, `${found}`));
  near(smoothed(Array(12).fill(3), 0.9), Array(12).fill(3));
  const found = smoothed([0, null, 1, ...Array(8).fill(1)], 0.5);
  near(found.slice(0, 3), [0, null, 0.5 / 0.75]); // (0.25*0 + 0.5*1) over (0.25 + 0.5)
  assert.ok(found[10] > 0.99 && found[10] < 1);
  const sparse = [0, null, 1]; // a handful of evaluations stays as it is
  assert.equal(smoothed(sparse, 0.5), sparse);
  const raw = [1, 2];
  assert.equal(smoothed(raw, 0), raw);
});

test("a logarithmic axis is offered where it shows more", async () => {
  const { suitsLog } = await load("parts/curve.ts");
  assert.deepEqual([[1, 100], [1, 99], [0, 1000], [null, 5], [1e-6, null, 1e-3]].map((values) => suitsLog([values])), [true, false, false, false, true]);
});

test("flat and twin curves are said, not drawn", async () => {
  const { arranged } = await load("pages/jobs/curves.ts");
  const steps = [1, 2, 3].map((step) => ({
    step, "reward/mean": step / 4, "reward/exact/mean": step / 4, "loss/clip_frac_low": 0, "loss/clip_frac_high": 0, "loss/policy": step * 1e-8,
    "kl/mean": step / 10, "loss/kl": (step / 10) * (1 + 1e-9), "loss/ratio_mean": 1 - step * 1e-7, "optim/lr": 1e-5 * step,
  }));
  const { drawn, said } = arranged([steps]);
  assert.deepEqual(drawn.map((panel) => [panel.title, panel.metrics]), [
    ["Reward", ["reward/mean"]], ["KL to the reference", ["kl/mean"]], ["Learning rate", ["optim/lr"]],
  ]);
  const by = Object.fromEntries(said.map((each) => [each.metric, `${each.value} ${each.why}`.trim()]));
  assert.deepEqual(by, {
    "reward/exact/mean": "the same as Reward", "loss/clip_frac_low": "0 throughout", "loss/clip_frac_high": "0 throughout",
    "loss/policy": "3.0e-8 at most: rounding", "loss/kl": "the same as KL to the reference, measured", "loss/ratio_mean": "1 throughout",
  });
  const other = steps.map((step) => ({ ...step, "loss/clip_frac_low": 0.5, "loss/kl": 1 / step.step }));
  const both = arranged([steps, other]); // what is flat in each, but at another height, and twins in one of them, are drawn
  assert.ok(both.drawn.some((panel) => panel.metrics.includes("loss/clip_frac_low")) && both.drawn.some((panel) => panel.metrics.includes("loss/kl")));
});

test("a job of one step has numbers and no curves", async () => {
  const { arranged } = await load("pages/jobs/curves.ts");
  const { drawn, said } = arranged([alike([0.5])]);
  assert.deepEqual([drawn, said], [[], [{ title: "Reward", metric: "reward/mean", value: "0.5", why: "measured once" }]]);
});

test("what a run came to is its evaluations, then its first and last steps", async () => {
  const { changeOf, outcomes } = await load("state/outcome.ts");
  const steps = [{ step: 0, "eval/greedy/reward": 0.5, "eval/greedy/reward_stderr": 0.03 }, ...alike([0, 0, 0.2, 0.4, 1, 1, 0.8, 1])];
  steps.push({ step: 8, "eval/greedy/reward": 0.75, "eval/greedy/reward_stderr": 0.04 });
  const [held, trained, ...more] = outcomes(steps);
  assert.deepEqual([held.title, held.before, held.after, more], [
    "Held-out reward, greedy", { value: 0.5, spread: 0.03, what: "step 0" }, { value: 0.75, spread: 0.04, what: "step 8" }, [],
  ]);
  const change = changeOf(held);
  assert.ok(Math.abs(change.spread - 0.05) < 1e-12 && change.value === 0.25 && change.says.includes("beyond"));
  assert.deepEqual([trained.before.what, trained.after.what, trained.before.value, trained.after.value], ["steps 1 to 2", "steps 7 to 8", 0, 0.9]);
  assert.ok(changeOf({ ...held, after: { ...held.after, value: 0.55 } }).says.includes("chance"));
  assert.equal(outcomes(alike([0.5]))[0].after, null);
  assert.equal(changeOf(outcomes(alike([0.5]))[0]), null);
  assert.deepEqual(outcomes([]), []);
});

const job = (id, reward, more = {}) => ({
  job_id: id, adapter_name: "sums", kind: "grpo", state: "completed", created_at: `2026-01-0${id}T00:00:00Z`, started_at: null, finished_at: null, metrics: {},
  summary: { reward_mean: reward, groups: 4 }, ...more,
});

test("a job's after is what the next round was posted", async () => {
  const { outcomeOf } = await load("pages/jobs/rounds.ts");
  const jobs = [job("1", 0.25), job("2", 0.5, { state: "failed" }), job("3", 0.75, { summary: { reward_mean: 0.75, reward_stderr: 0.1 } })];
  assert.deepEqual([outcomeOf(jobs[0], jobs).before.value, outcomeOf(jobs[0], jobs).after.value, outcomeOf(jobs[0], jobs).after.spread], [0.25, 0.75, 0.1]);
  assert.equal(outcomeOf(jobs[1], jobs).after, null); // it made no version
  assert.equal(outcomeOf(jobs[2], jobs).after, null);
  assert.ok(outcomeOf(jobs[2], jobs).note.includes("next round"));
});

test("the words under the learning curve say what it leaves out", async () => {
  const { meaning, rounds } = await load("pages/jobs/rounds.ts");
  const all = rounds([job("1", 0.5, { summary: { reward_mean: 0.5, groups: 4, groups_equal: 1 } }), job("2", 0.6)], "sums");
  assert.match(meaning(all), /every reward that was posted.*\(1 of 8\)/);
  assert.match(meaning(rounds([job("1", 0.5), job("2", 0.6)], "sums")), /post every group/);
});

test("a job that never ran has no duration", async () => {
  const { lasted } = await load("pages/jobs/rounds.ts");
  const now = Date.parse("2026-01-01T00:10:00Z");
  assert.equal(lasted(job("1", 0, { state: "cancelled", finished_at: "2026-01-01T00:06:00Z" }), now), "–");
  assert.equal(lasted(job("1", 0, { started_at: "2026-01-01T00:05:00Z", finished_at: "2026-01-01T00:05:30Z" }), now), "30 s");
  assert.equal(lasted(job("1", 0, { started_at: "2026-01-01T00:09:00Z" }), now), "60 s");
});

test("a metric finds its row in the table", async () => {
  globalThis.document ??= { baseURI: "http://x/ui/", getElementById: () => null };
  const { fits } = await load("state/definitions.svelte.ts");
  assert.ok(fits("eval/<mode>/reward", "eval/greedy/reward") && !fits("eval/<mode>/reward", "eval/greedy/add/reward"));
  assert.ok(fits("eval/<mode>/pass@<k>", "eval/sampled/pass@8") && !fits("kl/mean", "kl/mean2"));
});

test("a stream is heard at every sign of life, and a silent one fails", async () => {
  const { events } = await load("api/sse.ts");
  const bytes = (text) => new TextEncoder().encode(text);
  let control;
  const response = new Response(new ReadableStream({ start: (given) => void (control = given) }));
  let heard = 0;
  const stream = events(response, { heard: () => (heard += 1), silentMs: 200 });
  control.enqueue(bytes(": ping\n\n"));
  control.enqueue(bytes("event: jobs\ndata: []\n\n"));
  assert.deepEqual((await stream.next()).value, { event: "jobs", id: "", data: "[]" });
  assert.equal(heard, 2);
  await assert.rejects(stream.next(), /nothing came for 200 ms/);
});

test("an answer scores what stands behind the working, by its last number, as it is, or as a part", async () => {
  const { checked } = await load("pages/teach/scoring.ts");
  const cases = [
    ["<think>7+8=15</think>\n185", "185", "number", 1], ["It is 1,850.", "1850", "number", 1], ["185 or 186", "185", "number", 0],
    ["no idea", "185", "number", 0], ["185", "", "number", null], [" 1, 2 ", "1, 2", "exact", 1], ["It is 1, 2", "1, 2", "exact", 0],
    ["It is PARIS.", "Paris", "contains", 1], ["<think>Paris?</think> Rome", "Paris", "contains", 0],
  ];
  for (const [text, answer, check, score] of cases) assert.equal(checked(text, answer, check, null), score, `${check}: ${text}`);
  assert.equal(checked("abc", "", "pattern", /b/u), 1);
  assert.equal(checked("abc", "abc", "pattern", null), null);
});

test("pairs: everything is compared often enough and no two twice; shares of comparisons are the scores", async () => {
  const { nextPair, won } = await load("pages/teach/scoring.ts");
  const votes = [];
  const places = [0, 1, 2, 3, 5];
  for (let pair = nextPair(votes, places, 3); pair; pair = nextPair(votes, places, 3)) {
    votes.push({ a: pair[0], b: pair[1], winner: Math.max(...pair) });
    assert.ok(votes.length <= 10, "no pair comes twice");
  }
  const times = places.map((i) => votes.filter((vote) => vote.a === i || vote.b === i).length);
  assert.ok(times.every((each) => each >= 3), String(times));
  const shares = won(votes, 6);
  assert.deepEqual([shares[0], shares[4], shares[5]], [0, null, 1]);
  assert.deepEqual(won([{ a: 0, b: 1, winner: null }], 2), [0.5, 0.5]);
  assert.equal(nextPair([], [2], 3), null);
});

test("held-out prompts are spread evenly, are so many as was asked for, and never all", async () => {
  const { heldOut } = await load("pages/teach/scoring.ts");
  for (const count of [1, 2, 3, 8, 16, 33]) {
    for (const share of [0, 0.25, 0.5, 1]) {
      const held = heldOut(count, share);
      assert.equal(held.filter(Boolean).length, Math.min(count - 1, Math.round(count * share)));
      assert.equal(held.length, count);
    }
  }
  assert.deepEqual(heldOut(4, 0.5), [false, true, false, true]);
});

test("pasted lines are prompts with answers", async () => {
  const { parsed } = await load("pages/teach/scoring.ts");
  assert.deepEqual(parsed("2 + 3 => 5\n\n  Say hi \na => b => c"), [{ text: "2 + 3", answer: "5" }, { text: "Say hi", answer: "" }, { text: "a => b", answer: "c" }]);
});

test("the examples' answers are right by their own check, and every lesson has prompts to hold out", async () => {
  const { EXAMPLES } = await load("pages/teach/examples.ts");
  const { checked } = await load("pages/teach/scoring.ts");
  for (const task of EXAMPLES) {
    assert.ok(task.prompts.length >= 8);
    for (const { text, answer } of task.prompts) if (answer) assert.equal(checked(answer, answer, task.check, null), 1, text);
  }
});

test("the palette finds by words, by letters in order, and nothing else", async () => {
  const { matching } = await load("parts/commands.ts");
  const commands = [{ kind: "Go to", name: "Rollouts" }, { kind: "Version", name: "taught@12" }, { kind: "Activate", name: "taught@12" }, { kind: "Job", name: "other, a1b2c3" }];
  const names = (typed) => matching(commands, typed, 9).map((each) => `${each.kind} ${each.name}`);
  assert.equal(names("").length, 4);
  assert.deepEqual(names("act taught"), ["Activate taught@12"]);
  assert.deepEqual(names("rlt"), ["Go to Rollouts"]);
  assert.deepEqual(names("b2c"), ["Job other, a1b2c3"]);
  assert.deepEqual(names("zzz"), []);
});

const version = (id, reward, extra = {}) => ({
  version: id, number: Number(id.split("@")[1]), parent: "base", job_id: null, note: null, base_model: "starter", metrics: { "reward/mean": reward, "kl/mean": 0.05 }, held_out: null,
  created_at: `2026-01-0${id.split("@")[1]}T00:00:00Z`, ...extra,
});

test("versions are found by name, note, base model and reward", async () => {
  const { found } = await load("pages/adapters/shelved.ts");
  const all = [version("sums@1", 0.25), version("sums@2", 0.75, { note: "Weak at CARRIES" }), version("tone@3", 0.5, { base_model: "qwen", parent: "sums@2" })];
  const names = (typed) => found(all, typed).map((each) => each.version);
  assert.deepEqual(names(" "), ["sums@1", "sums@2", "tone@3"]);
  assert.deepEqual(names("carries weak"), ["sums@2"]);
  assert.deepEqual(names("qwen"), ["tone@3"]);
  assert.deepEqual(names("0.75"), ["sums@2"]);
  assert.deepEqual(names("reward>=0.5"), ["sums@2", "tone@3"]);
  assert.deepEqual(names("reward>0.5 kl/mean<0.1"), ["sums@2"]);
  assert.deepEqual(names("reward=0.25"), ["sums@1"]);
  assert.deepEqual(names("entropy>0"), []);
  const judged = found([version("sums@1", 0.25, { held_out: 0.9 }), version("sums@2", 0.95)], "held_out>0.8");
  assert.deepEqual(judged.map((each) => each.version), ["sums@1"]);
});

test("a version is judged by its own held-out reward, never by its predecessor's under its name", async () => {
  const { headline } = await load("pages/adapters/lineage.ts");
  assert.deepEqual(headline(version("sums@2", 0.6, { held_out: 0.7 })), { name: "held out", value: 0.7 });
  assert.deepEqual(headline(version("sums@2", 0.6, { parent: "sums@1" })), { name: "sums@1 was posted", value: 0.6 });
  assert.equal(headline(version("sums@2", 0.6, { metrics: {} })), null);
});

test("a change between the same two evaluations is told prompt by prompt", async () => {
  const { changeOf, outcomes, withPaired } = await load("state/outcome.ts");
  const all = outcomes([{ step: 0, "eval/greedy/reward": 0.5, "eval/greedy/reward_stderr": 0.3 }, { step: 4, "eval/greedy/reward": 0.75, "eval/greedy/reward_stderr": 0.4 }]);
  const paired = [{ measure: "greedy/reward", prompts: 9, difference: 0.25, error: 0.1, p: 0.02 }];
  assert.equal(changeOf(all[0]).spread, 0.5);
  assert.equal(changeOf(withPaired(all, { first: 0, last: 4, paired })[0]).spread, 0.1);
  assert.match(changeOf(withPaired(all, { first: 0, last: 4, paired })[0]).says, /beyond/);
  assert.equal(changeOf(withPaired(all, { first: 0, last: 3, paired })[0]).spread, 0.5);
});

test("commands are of what a run has, and quoted for a shell", async () => {
  const { commandsOf, quoted } = await load("state/shell.ts");
  assert.equal(quoted("runs/a b"), "'runs/a b'");
  assert.equal(quoted("it's"), "'it'\\''s'");
  const run = { directory: "runs/a", state: "stopped", step: 3, steps: 9 };
  assert.deepEqual(commandsOf({ ...run, versions: [] }).map((each) => each.label), ["Continue", "Diagnose"]);
  const all = commandsOf({ ...run, versions: ["a@3"], step: 9, state: "finished" });
  assert.deepEqual(all.map((each) => each.label), ["Chat", "Serve", "Export", "Compare with the base", "Diagnose"]);
  assert.equal(all[1].command, "groupwise serve runs/a");
});

test("of each name the newest few are listed, until all are asked for", async () => {
  const { shelved } = await load("pages/adapters/shelved.ts");
  const all = [...Array.from({ length: 9 }, (_, i) => version(`sums@${i + 1}`, 0)), version("tone@1", 0)];
  const rows = (open, whole) => shelved(all, (name) => open.includes(name), (name) => whole.includes(name)).map((row) => row.id);
  assert.deepEqual(rows([], []), ["name sums", "name tone"]);
  assert.deepEqual(rows(["sums"], []), ["name sums", "sums@9", "sums@8", "sums@7", "sums@6", "sums@5", "more sums", "name tone"]);
  assert.equal(rows(["sums"], ["sums"]).length, 11);
  assert.deepEqual(rows(["tone"], []), ["name sums", "name tone", "tone@1"]);
});

const transition = (seq, kind, message, data = {}) => ({ seq, at: "2026-05-01T10:00:00Z", kind, message, data });
const gate = { version: "sums@2", against: "sums@1", job_id: "j".repeat(32), prompts: 24, reward: 0.5, reward_active: 0.46875, difference: 0.03125, lower_bound: -0.125, margin: 0.02, error: 0.025, look: 1 };

test("each decision of a gate, a shadow and a canary says what was compared, on how much and why", async () => {
  const { decisions, differs, evidence } = await load("pages/learn/decisions.ts");
  const made = decisions([
    transition(9, "rolled_back", "sums@1 was rolled back: by hand", { version: "sums@1", against: "base", stage: "canary" }),
    transition(8, "promoted", "sums@2 is active: surely not lower", { version: "sums@2", against: "sums@1", stage: "canary", ratings: 12, ratings_active: 80, rating: 0.75, rating_active: 0.5 }),
    transition(7, "canary_began", "sums@2 answers 10%", { version: "sums@2", against: "sums@1", ratings: 61 }),
    transition(6, "shadow_passed", "sums@2 passed its shadow: within bounds", { version: "sums@2", against: "sums@1", prompts: 50 }),
    transition(5, "gate_passed", "sums@2 passed the gate: reward 0.5", { ...gate, prompts_needed: 24, confirm_prompts: 30, confirm_difference: 0, confirm_lower_bound: -0.01, confirm_error: 0.05, confirm_margin: 0.02, confirm_prompts_needed: 30 }),
    transition(4, "job_queued", "job j trains sums", {}),
    transition(3, "gate_refused", "sums@2 was refused: too few: 24", { ...gate, prompts_needed: 149 }),
    transition(2, "gate_refused", "sums@1 was refused: lower", gate),
  ]);
  assert.deepEqual(made.map((each) => [each.seq, each.stage, each.outcome, each.passed]), [
    [9, "canary", "rolled back", false], [8, "canary", "went live", true], [6, "shadow", "passed", true],
    [5, "gate", "passed", true], [3, "gate", "refused", false], [2, "gate", "refused", false],
  ]);
  const [byHand, canary, shadow, passed, few, lower] = made;
  assert.equal(few.reason, "too few: 24");
  assert.deepEqual([byHand.difference, evidence(byHand), differs(byHand)], [null, "", ""]);
  assert.equal(canary.difference, 0.25);
  assert.equal(evidence(canary), "12 ratings of it, 80 of sums@1; 61 end it at the latest");
  assert.equal(evidence(shadow), "50 pairs of answers");
  assert.equal(evidence(passed), "24 held-out prompts, which are enough");
  assert.equal(evidence(passed, passed.confirmed), "30 held-out prompts, which are enough");
  assert.equal(evidence(few), "24 held-out prompts; 149 like these would do");
  assert.equal(evidence(lower), "24 held-out prompts; no number like these would do");
  assert.equal(differs(few), "+0.0313, surely not below −0.125 (97.5%); −0.02 is allowed");
  assert.match(differs({ ...few, confidence: 1 - 1e-5 }), /\(99.999%\)/);
});

const idle = {
  enabled: true, paused: false, reason: "", adapter: "sums", ratings: 3, after: 8, counts: { waiting: 3 }, job_id: null, jobs_last_hour: 0, max_jobs_per_hour: 6,
  active: "base", trial: null, trial_share: null, trial_stage: null, trial_pairs: null, trial_ratings: null, trial_most: null, transitions: [],
};

test("what learning waits for is counted", async () => {
  const { waiting } = await load("pages/learn/decisions.ts");
  assert.deepEqual(waiting(idle), { text: "5 more ratings with something to learn make the next job.", have: 3, of: 8 });
  const trial = { ...idle, trial: "sums@2", trial_share: 0.1, trial_stage: "canary", trial_ratings: 60, trial_most: 61 };
  assert.deepEqual([waiting(trial).have, waiting(trial).of], [60, 61]);
  assert.match(waiting(trial).text, /^sums@2 is on trial: it answers 10% of the requests in place of base\. 1 more rating /);
  const shadow = { ...trial, trial_stage: "shadow", trial_ratings: null, trial_pairs: 6, trial_most: 50 };
  assert.match(waiting(shadow).text, /once more, unseen\. 44 more pairs/);
  assert.equal(waiting({ ...idle, paused: true }).of, 8);
  assert.equal(waiting({ ...idle, enabled: false, after: null }).of, null);
  assert.equal(waiting({ ...idle, job_id: "j" }).of, null);
});

test("raters are told apart, with what became of their ratings", async () => {
  const { raters, said } = await load("pages/learn/decisions.ts");
  const rating = (user, score, state) => ({ user, score, state, correction: null, better_than: null, comment: null });
  const found = raters([rating("a", 1, "trained"), rating(null, 0, "dropped"), rating("a", 0, "waiting"), { ...rating("b", null, "trained"), correction: "9" }, { ...rating("a", 1, "distrusted"), key: "phone" }]);
  assert.deepEqual(found.map((each) => [each.user, each.key, each.total, each.mean]), [["a", null, 2, 0.5], [null, null, 1, 0], ["b", null, 1, null], ["a", "phone", 1, 1]]);
  assert.deepEqual(found[0].states, { waiting: 1, training: 0, trained: 1, dropped: 0, distrusted: 0 });
  assert.equal(said({ ...rating("b", 0, "trained"), correction: "9" }), "bad; should have said: 9");
});

test("what to do next is the first thing that holds", async () => {
  const { next } = await load("pages/now/next.ts");
  const job = (state, more = {}) => ({ job_id: "j1", state, adapter_name: "sums", adapter_version: null, step: 1, steps: 4, error: null, ...more });
  const state = { failing: [], jobs: [], active: "base", asked: false, learn: { ...idle, enabled: false, after: null, counts: {} } };
  const href = (more) => next({ ...state, ...more }).href;
  assert.equal(href({}), "#/play");
  assert.equal(href({ asked: true }), "#/teach");
  assert.equal(href({ failing: ["disk_space"], jobs: [job("running")] }), "");
  assert.equal(href({ jobs: [job("queued"), job("running")] }), "#/jobs/j1");
  const failed = next({ ...state, jobs: [job("failed", { error: { message: "the loss is not a number" } })] });
  assert.equal(failed.href, "#/jobs/j1");
  assert.match(failed.text, /the loss is not a number/);
  assert.equal(href({ jobs: [job("completed", { adapter_version: "sums@1" })] }), "#/adapters?version=sums%401");
  assert.equal(href({ jobs: [job("completed", { adapter_version: "sums@1" })], active: "sums@1" }), "#/play");
  assert.equal(href({ jobs: [job("completed", { adapter_version: "sums@1" })], active: "sums@1", learn: { ...state.learn, counts: { waiting: 1 } } }), "#/teach");
  assert.equal(href({ learn: idle }), "#/play");
  assert.equal(href({ learn: { ...idle, paused: true } }), "#/learn");
  assert.equal(href({ learn: { ...idle, trial: "sums@2", trial_stage: "canary", trial_most: 61 } }), "#/learn");
  const refused = next({ ...state, learn: { ...idle, transitions: [transition(3, "gate_refused", "x: y", { ...gate, prompts_needed: 149 })] } });
  assert.match(refused.text, /24 held-out prompts say too little.* 149 /);
  assert.equal(refused.href, "#/learn");
});

test("a job's commands name its server, and fit its state", async () => {
  const { commandsOfJob } = await load("state/shell.ts");
  const job = { job_id: "6f1e", state: "running", adapter_version: null };
  assert.deepEqual(commandsOfJob(job, "http://a:8/").map((each) => each.command), ["groupwise train wait 6f1e --follow --url http://a:8", "groupwise train cancel 6f1e --url http://a:8"]);
  const made = commandsOfJob({ ...job, state: "completed", adapter_version: "sums@1" }, "http://host:9/proxied/");
  assert.deepEqual(made.map((each) => each.label), ["Show", "Chat", "Activate", "Download"]);
  assert.ok(made.every((each) => each.command.endsWith(" --url http://host:9/proxied")));
});

test("token ids of images are read and written as they are", async () => {
  const { parsed, written } = await load("api/json.ts");
  const text = '{"ids":[1016,4611686018427387905,9205210018774450191],"said":"4611686018427387905 \\"4611686018427387906\\\\","p":-0.1234567890123456789,"e":1e21}';
  const found = parsed(text);
  assert.deepEqual(found.ids, [1016, 4611686018427387905n, 9205210018774450191n]);
  assert.equal(found.said, '4611686018427387905 "4611686018427387906\\');
  assert.equal(typeof found.p, "number");
  assert.equal(written({ ids: found.ids, said: found.said, none: undefined }), text.replace(/,"p".*/, "}"));
  assert.equal(written([1, "2", null]), '[1,"2",null]');
});

test("a prompt is a line without what its template writes", async () => {
  const { lastTurn } = await load("state/format.ts");
  assert.equal(lastTurn("<|im_start|>user\n<img><IMG_CONTEXT></img>What is it?<|im_end|>\n<|im_start|>assistant\n"), "[image] What is it?");
  assert.equal(lastTurn("<|im_start|>user\nHello <img> there<|im_end|>\n"), "Hello <img> there");
});

test("pictures stand in front of what is said about them", async () => {
  const { content } = await load("api/pictures.ts");
  const picture = { url: "data:image/png;base64,AA==", name: "a.png" };
  assert.equal(content("Hello"), "Hello");
  assert.deepEqual(content("What?", [picture]).map((part) => part.type), ["image_url", "text"]);
  assert.deepEqual(content("", [picture]), [{ type: "image_url", image_url: { url: picture.url } }]);
});

test("of many questions one is asked at a time, and the newest last", async () => {
  const { unhurried } = await load("api/unhurried.ts");
  const soon = unhurried(1);
  const asked = [];
  let open = 0;
  let most = 0;
  const done = new Promise((resolve) => {
    for (let i = 0; i < 100; i += 1) {
      soon(async () => {
        asked.push(i);
        most = Math.max(most, (open += 1));
        await new Promise((later) => setTimeout(later, 5));
        open -= 1;
        if (i === 99) resolve();
        throw new Error("what fails is asked again with the next");
      });
    }
  });
  await done;
  assert.deepEqual([asked, most], [[0, 99], 1]);
});
