"""prime-rl's rl.toml: what it is here, with its defaults, in its newer and older names, and as a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_project import cli
from groupwise.config.loss import loss_of
from groupwise.config.run import load_config as load_native
from groupwise.errors import ConfigError
from groupwise.run.config_file import LoadedRun, read_run
from groupwise.run.importing import written
from groupwise.store.tracking import read_metrics
from wording import raises

TASKSET = """\
max_steps = 20
seq_len = 1024

[deployment]
num_train_gpus = 1
num_infer_gpus = 1

[model]
name = "owner/Model-0.6B"

[monitors.wandb]
project = "letters"
name = "first-letters"

[orchestrator]
batch_size = 48
group_size = 12

[orchestrator.train.sampling]
max_completion_tokens = 96

[[orchestrator.train.source]]
name = "letters"

[orchestrator.train.source.env.taskset]
id = "letters"
words = [
    "one", # a list of several lines
    "two",
]

[orchestrator.train.source.env.agent.harness]
id = "null"

[orchestrator.train.source.env.agent.runtime]
type = "subprocess"

[trainer.optim]
lr = 2e-6

[ckpt] # at the end

[inference]

[orchestrator.renderer]
name = "default"
"""

OLDER = """\
max_steps = 200
[wandb]
project = "sorting"
name = "sorting"
[model]
name = "owner/Model-4B"
[trainer.model]
impl = "auto"
[trainer.model.ac]
freq = 1
[trainer.model.experimental.lora]
rank = 24
alpha = 48
[trainer.optim]
lr = 1e-5
[orchestrator]
batch_size = 512
rollouts_per_example = 8
seq_len = 2048
[orchestrator.sampling]
max_tokens = 768
[[orchestrator.env]]
id = "owner/sorting@0.1.2"
name = "sorting"
args = { min_turns = 3, power = false }
[inference]
"""

GENERATED = """\
max_steps = 2
[model]
name = "starter"
[orchestrator]
batch_size = 8
group_size = 4
[orchestrator.train.sampling]
max_completion_tokens = 8
[[orchestrator.train.env]]
id = "owner/reasoning-gym"
[orchestrator.train.env.args]
gym = [{ name = "chain_sum", weight = 2.0, config = { min_terms = 2, max_terms = 2 } }, "spell_backward"]
num_train_examples = 24
system_prompt = "Answer in <answer></answer>."
[orchestrator.eval]
interval = 2
num_examples = 4
[[orchestrator.eval.env]]
id = "owner/reasoning-gym"
args = { gym = "chain_sum" }
[trainer.model.lora]
rank = 4
[trainer.optim]
lr = 1e-4
[inference]
"""


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str, *overrides: str) -> LoadedRun:
        (tmp_path / "rl.toml").write_text(text)
        return read_run(tmp_path / "rl.toml", overrides)

    return read


def test_a_taskset_with_the_defaults_of_prime_rl(read):
    loaded = read(TASKSET)
    config = loaded.runnable()
    assert loaded.system == "prime-rl" and (config.name, config.model) == ("first-letters", "owner/Model-0.6B")
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_tokens) == (4, 12, 96)
    assert (config.rollout.temperature, config.rollout.refill, config.rollout.max_staleness) == (1.0, 1.0, 0)
    algo, train = config.algo, config.train
    assert (algo.policy_loss, algo.clip_low, algo.clip_high, algo.advantage) == ("dppo", 0.2, 0.2, "mean")
    assert algo.dro_beta == 2e-3  # kl_tau is the weight of the square, dro_beta of half of it
    assert (train.steps, train.learning_rate, train.weight_decay, train.max_grad_norm) == (20, 2e-6, 0.01, 1.0)
    assert (train.schedule, train.warmup_steps, train.lora, config.dtype) == ("constant", 0, None, "float32")
    assert (config.checkpoint.every, config.tracking.wandb, config.tracking.wandb_name) == (0, "letters", config.name)
    assert config.env is not None and config.env.agent == "groupwise.bridges.verifiers.tasksets:TasksetAgent"
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    assert config.env.args == {
        "taskset": "letters",
        "config": {"taskset": {"words": ["one", "two"]}, "agent": agent},
    }
    assert (config.env.max_turns, config.env.timeout_s, config.eval) == (4096, 3600.0, None)
    idle = {note.place.split()[0] for note in loaded.idle}
    assert idle == {"deployment.num_train_gpus", "deployment.num_infer_gpus", "inference", "orchestrator.renderer"}
    [behind] = loaded.differs
    assert str(behind).startswith("orchestrator.max_off_policy_steps: 0: all parameters are trained")


def test_where_every_value_comes_from(read):
    origins = {key: origin for key, _, origin in read(TASKSET, "orchestrator.group_size=16", "seed=3").origins()}
    assert origins["train.learning_rate"] == "trainer.optim.lr rl.toml:39"
    assert origins["rollout.group_size"] == "orchestrator.group_size given as 'orchestrator.group_size=16'"
    assert origins["train.weight_decay"] == "prime-rl's default of trainer.optim.weight_decay"
    assert origins["env.args"] == "orchestrator.train.source rl.toml:22"
    assert origins["seed"] == "given as 'seed=3'"


def test_the_names_of_older_versions(read):
    loaded = read(OLDER)
    config = loaded.runnable()
    assert (config.name, config.tracking.wandb, config.rollout.group_size) == ("sorting", "sorting", 8)
    assert (config.rollout.prompts_per_step, config.rollout.max_tokens) == (64, 768)
    assert config.train.lora is not None and (config.train.lora.rank, config.train.lora.alpha) == (24, 48.0)
    assert (config.train.lora.dropout, config.train.lora.targets) == (0.0, "all-linear")
    assert config.train.gradient_checkpointing is True
    assert (config.rollout.max_staleness, config.rollout.in_flight_updates) == (1, True)
    assert config.env is not None and config.env.agent == "groupwise.bridges.verifiers.before_0_4:VerifiersAgent"
    assert config.env.args == {"environment": "owner/sorting", "args": {"min_turns": 3, "power": False}}
    assert not loaded.differs


@pytest.mark.parametrize(
    "source",
    [
        '[[orchestrator.train.env]]\ntaskset = { id = "x-v1", n = 3 }\n'
        'harness = { id = "bash", runtime = { type = "docker" } }',
        '[[orchestrator.train.env]]\nenv.taskset = { id = "x-v1", n = 3 }\n'
        'env.agent.harness = { id = "bash", runtime = { type = "docker" } }',
        '[[orchestrator.train.source]]\nenv.taskset = { id = "x-v1", n = 3 }\n'
        'env.agent.harness = { id = "bash" }\nenv.agent.runtime = { type = "docker" }',
    ],
)
def test_the_runtime_is_the_agents_wherever_it_stood(read, source):
    config = read(f"max_steps = 1\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n{source}\n[trainer]\n").runnable()
    assert config.env is not None and config.env.args == {
        "taskset": "x-v1",
        "config": {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}, "taskset": {"n": 3}},
    }


def test_evaluation_of_a_taskset(read):
    said = """
[orchestrator.eval]
interval = 5
group_size = 2
num_examples = 64
[orchestrator.eval.sampling]
max_completion_tokens = 96
[[orchestrator.eval.source]]
env.taskset = { id = "letters", split = "test" }
"""
    loaded = read(TASKSET + said)
    config = loaded.runnable()
    assert config.eval is not None and (config.eval.every, config.eval.k, config.eval.modes) == (5, 2, ("sampled",))
    assert config.env is not None and config.env.args["eval_config"] == {"taskset": {"split": "test"}}
    told = [str(note) for note in loaded.differs]
    assert any(each.endswith("taskset.words, agent of the trained environment hold in evaluation too") for each in told)
    assert config.eval.limit == 64
    greedy = read(TASKSET + said, "orchestrator.eval.sampling.temperature=0", "orchestrator.eval.group_size=1")
    assert greedy.config.eval is not None and greedy.config.eval.modes == ("greedy",)
    assert greedy.config.eval.max_tokens == 96 and greedy.config.eval.temperature is None
    section = "orchestrator.eval.sampling"
    warm = read(
        TASKSET + said, f"{section}.temperature=0.6", f"{section}.top_p=0.9", f"{section}.max_completion_tokens=7"
    )
    drawn = warm.config.eval_sampling()
    assert (drawn.temperature, drawn.top_p, drawn.max_tokens) == (0.6, 0.9, 7)


def test_the_loss(read):
    numbers = ["trainer.loss.dppo_mask_low=0.1", "trainer.loss.dppo_mask_high=0.3", "trainer.loss.kl_tau=0"]
    config = read(TASKSET, *numbers).runnable()
    spec = loss_of(config.algo, max_tokens=96, stale=True)
    assert (spec.surrogate, spec.clip_low, spec.clip_high, spec.dro_beta) == ("dppo_tv", 0.1, 0.3, None)
    assert (spec.anchor, spec.reduction) == ("behaviour", "token_mean")


def test_schedules(read):
    linear = [
        *("trainer.scheduler.type=linear", "trainer.scheduler.warmup_steps=3"),
        *("trainer.scheduler.decay_steps=4", "trainer.scheduler.min_lr=1e-6"),
    ]
    train = read(TASKSET, *linear).runnable().train
    assert (train.schedule, train.warmup_steps, train.decay_steps, train.final_rate) == ("wsd", 3, 4, 0.5)
    train = read(TASKSET, "trainer.scheduler.type=cosine").runnable().train
    assert (train.schedule, train.warmup_steps, train.final_rate) == ("cosine", 10, 0.0)
    train = read(TASKSET, "trainer.scheduler.type=linear", "trainer.scheduler.decay_steps=0").runnable().train
    assert (train.schedule, train.warmup_steps, train.decay_steps) == ("constant", 10, None)
    unread = read(TASKSET, "trainer.scheduler.warmup_steps=3")
    assert "trainer.scheduler.warmup_steps" in {note.place.split()[0] for note in unread.idle}


def test_how_far_sampling_runs_ahead(read):
    def rollout(*overrides: str) -> Any:
        return read(OLDER, *overrides).runnable().rollout

    assert rollout("orchestrator.max_off_policy_steps=0").max_staleness == 0
    assert rollout("max_async_level=3").max_staleness == 3
    assert rollout("max_async_level=3", "orchestrator.max_off_policy_steps=2").max_staleness == 2


@pytest.mark.parametrize(
    "override",
    [
        "orchestrator.env[0].curriculum={gates: {zero: {type: advantage_range}}}",
        "orchestrator.buffer={online_difficulty_filtering: true, seed: 4}",
        "orchestrator.pre_batch_filters=[{type: zero_advantage}, {type: gibberish}]",
        "orchestrator.filters=[{type: zero_advantage, enforce: true}]",
    ],
)
def test_groups_that_teach_nothing_are_replaced_where_they_are_there(read, override):
    assert read(OLDER).runnable().rollout.refill == 1
    assert read(OLDER, override).runnable().rollout.refill == 64
    assert read(OLDER, "orchestrator.post_batch_filters=[{type: zero_advantage}]").runnable().rollout.refill == 1


REFUSED = [
    "orchestrator.algo.type=max_rl",
    "trainer.loss.type=ipo",
    "trainer.loss.adv_tau=2",
    "trainer.optim.type=muon",
    "trainer.optim.max_norm=None",
    "orchestrator.token_batch_size=4096",
    "max_steps=null",
    "resume.step=15",
    "orchestrator.eval={source: [{id: other}]}",
    "orchestrator.env[1]={id: other}",
    "orchestrator.env[0].curriculum.sampler.type=difficulty_pool",
    "orchestrator.buffer={easy_threshold: 1.0, seed: 1}",
    "orchestrator.filters=[{type: gibberish, enforce: true}]",
    "orchestrator.renderer.thinking_retention=all",
    "orchestrator.model.name=owner/fp8",
    "orchestrator.env[0].algo.type=opd",
    "orchestrator.sampling.extra_body={seed: 3}",
]


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_be_another_run_is_refused_with_what_runs(read, override):
    loaded = read(OLDER, override)
    with raises(ConfigError):
        loaded.runnable()
    words = [word for note in loaded.refused for word in note.instead.split()]
    read(OLDER, override, *words).runnable()


WRONG = [
    "orchestrator.group_sise=4",
    "trainer.optim.learning_rte=4",
    "orchestrator.rollouts_per_example=1",
    "orchestrator.rollouts_per_example=null",
    "orchestrator.batch_size=100",
    "orchestrator.batch_size=4",
    "orchestrator.group_size=4",
    "orchestrator.env[0].argss={}",
    "orchestrator.env=[{name: x}]",
    "trainer.optim.lr=fast",
    "trainer.scheduler.type=wsd",
]


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_be_read(read, override):
    with raises(ConfigError):
        read(OLDER, override)


@pytest.mark.parametrize(
    "text",
    [
        'max_steps = 3\n[model]\nname = "x"\n[optim]\nlr = 1e-6\n',
        '[server]\nport = 8000\n[model]\nname = "x"\n',
        'batch_size = 8\ngroup_size = 4\n[[train.source]]\nid = "x"\n',
    ],
)
def test_the_file_of_one_process_is_refused_with_what_to_do(read, text):
    with raises(ConfigError):
        read(text)


def test_what_import_writes_loads_as_the_same_run(read, tmp_path):
    loaded = read(GENERATED)
    text = written(loaded, tmp_path / "native.yaml")
    assert load_native(tmp_path / "native.yaml") == loaded.runnable()
    assert text.startswith("# From rl.toml, which is in prime-rl's words.")


@pytest.mark.long
def test_generated_problems_train_on_the_starter(read, tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    config = read(GENERATED).runnable()
    assert config.data is not None and config.data.size == 24 and config.data.system == "Answer in <answer></answer>."
    assert config.data.tasks == {"chain_sum": {"min_terms": 2, "max_terms": 2, "weight": 2.0}, "spell_backward": {}}
    assert config.eval is not None and config.eval.data is not None and config.eval.data.size == 4
    result = cli("run", "rl.toml", "run_dir=out", "--json")
    assert json.loads(result.stdout)["steps"] == 2 and "not as in prime-rl" in result.stderr
    metrics = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [each["step"] for each in metrics if "rollout/count" in each] == [1, 2]
    assert all(each["rollout/count"] == 8 for each in metrics if "rollout/count" in each)
    assert [each["step"] for each in metrics if "eval/sampled/reward" in each] == [0, 2]


def test_generated_problems_are_evaluated_on_their_own(read):
    others = "orchestrator.eval.env[0].args={gym: spell_backward, num_eval_examples: 7}"
    config = read(GENERATED, others, "orchestrator.eval.num_examples=-1").runnable()
    assert config.eval is not None and config.eval.data is not None
    assert (config.eval.data.tasks, config.eval.data.size) == ({"spell_backward": {}}, 7)
    with raises(ConfigError):
        read(GENERATED, "orchestrator.eval.env[0].id=math500").runnable()


def test_the_shares_of_several_sources(read):
    more = "orchestrator.train.env[1]={id: reasoning-gym, ratio: 3, args: {gym: leg_counting}}"
    config = read(GENERATED, more, "orchestrator.eval=null").runnable()
    assert config.data is not None and config.data.tasks["leg_counting"] == {"weight": 3}
    assert config.data.tasks["chain_sum"]["weight"] == 2


def test_another_environment_may_play_in_place_of_the_files(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(
        "class Agent:\n"
        "    def cases(self): return [{'word': word} for word in ('one', 'two', 'three', 'four')]\n"
        "    async def __call__(self, case, client, model):\n"
        "        said = [{'role': 'user', 'content': case['word']}]\n"
        "        answer = await client.chat.completions.create(model=model, messages=said)\n"
        "        return {'reward': float(len(answer.choices[0].message.content or '') % 5)}\n"
    )
    small = ["model.name=starter", "max_steps=2", "orchestrator.batch_size=8", "orchestrator.group_size=4"]
    (tmp_path / "rl.toml").write_text(TASKSET)
    said = [*small, "orchestrator.train.sampling.max_completion_tokens=6", "monitors=null"]
    result = cli("run", "rl.toml", *said, "env.agent=my_agent:Agent", "env.args={}", "run_dir=out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 2
