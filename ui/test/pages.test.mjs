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
  const steps = [1, 2].map((step) => ({ step, time: `t${step}`, "reward/mean": step, "mine/speed": step, "mine/same": 3, "eval/greedy/add/reward": step }));
  assert.deepEqual(others(steps).map((panel) => panel.metrics), [["eval/greedy/add/reward"], ["mine/speed"]]);
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
  const report = { written: "", runs: [one, { ...one, detail: { run: "c", config: { seed: 2, x: 2 } } }] };
  const ask = (path, query = "") => answered(report, path, new URLSearchParams(query));
  const ids = async (query) => (await ask("v1/runs/a~b/rollouts", query).json()).rows.map((row) => row.id);
  assert.deepEqual((await ask("v1/runs").json()).runs.length, 2);
  assert.deepEqual(await ask("v1/runs/a~b").json(), one.detail);
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
