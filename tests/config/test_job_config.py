"""What a training request may ask for: the defaults of the seed, every loss option, and what is refused and how."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from groupwise.config.algo import AlgoConfig
from groupwise.config.job import GrpoJobConfig, SftJobConfig, deadline_at, parse_job_config
from groupwise.config.loss import PRESETS, resolve_loss
from groupwise.errors import ConfigError
from wording import raises

SEED_EXAMPLE = {
    "learning_rate": 1e-5,
    "kl_coeff": 0.1,
    "clip_epsilon": 0.2,
    "lora_rank": 16,
    "output_name": "math-correctness",
    "auto_load": True,
}


def grpo(**options) -> GrpoJobConfig:
    return parse_job_config("grpo", options)


def test_nothing_given_is_a_whole_request():
    config, sft = grpo(), parse_job_config("sft", {})
    assert (config.learning_rate, config.kl_coeff, config.clip_epsilon, config.auto_load) == (1e-5, 0.1, 0.2, True)
    assert (sft.learning_rate, sft.epochs, sft.batch_size, sft.auto_load) == (1e-4, 3, 8, True)
    for each in (config, sft):
        assert each.lora_rank is each.lora_alpha is each.base_adapter is each.output_name is None
        assert each.checkpoint_interval is None
    assert config.loss(recorded=False) == resolve_loss("grpo", clip_low=0.2, clip_high=0.2, kl="k3", kl_coeff=0.1)


def test_the_request_of_the_seed_page_is_the_default_with_a_name():
    config = grpo(**SEED_EXAMPLE)
    assert config.loss(recorded=False) == grpo().loss(recorded=False)
    assert config.output_name == "math-correctness" and config.lora_rank == 16


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_alone_is_the_published_loss(preset):
    """The defaults of clip_epsilon and kl_coeff are GRPO's and spoil no other algorithm."""
    expected = {"reduction_length": 256.0} if preset == "dr_grpo" else {}
    if preset == "grpo":
        expected |= {"kl": "k3", "kl_coeff": 0.1}
    config = grpo(policy_loss=preset)
    assert config.loss(recorded=False) == resolve_loss(preset, **expected)
    assert config.advantage == ("mean" if preset == "dr_grpo" else "group_std")


def test_of_recorded_completions_a_sequence_ratio_is_corrected():
    """Nobody says that it was the job's own policy that sampled them."""
    with raises(ValueError, field="policy_loss", kind="conflict"):  # a request names no code
        grpo(policy_loss="os:system")
    assert grpo(policy_loss="gspo").loss(recorded=True) == resolve_loss("gspo", correction="tis_sequence")
    assert grpo(policy_loss="dapo").loss(recorded=True) == resolve_loss("dapo")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip_epsilon": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"clip_epsilon": 0.1, "clip_high": 0.3}, {"clip_low": 0.1, "clip_high": 0.3}),
        ({"clip_low": 0.1, "clip_high": 0.3}, {"clip_low": 0.1, "clip_high": 0.3}),
        ({"clip_low": 0.1}, {"clip_low": 0.1, "clip_high": 0.2}),
        ({"kl_coeff": 0}, {"kl": None, "kl_coeff": None}),
        ({"kl_coeff": None, "clip_epsilon": None}, {}),  # null is a field that is left out
        ({"kl": "none"}, {"kl": None, "kl_coeff": None}),
        ({"kl": "k1"}, {"kl": "k1"}),
        ({"kl_coeff": 0.5}, {"kl_coeff": 0.5}),
        ({"entropy_coeff": 0.01, "reduction": "token_mean"}, {"entropy_coeff": 0.01, "reduction": "token_mean"}),
        ({"surrogate": "reinforce"}, {"surrogate": "reinforce"}),
        ({"anchor": "old", "correction": "tis_token"}, {"anchor": "old", "correction": "tis_token"}),
        ({"dual_clip": 3.0, "opsm_threshold": 0.1}, {"dual_clip": 3.0, "opsm_threshold": 0.1}),
    ],
)
def test_options_of_the_loss(options, expected):
    wanted = {"kl": "k3", "kl_coeff": 0.1} | expected
    wanted = {key: value for key, value in wanted.items() if value is not None}
    assert grpo(**options).loss(recorded=False) == resolve_loss("grpo", **wanted)


def test_another_presets_clipping_and_divergence_can_be_asked_for():
    config = grpo(policy_loss="dapo", clip_epsilon=0.1, kl_coeff=0.05)
    assert config.loss(recorded=False) == resolve_loss("dapo", clip_low=0.1, clip_high=0.1, kl="k3", kl_coeff=0.05)
    assert grpo(policy_loss="dapo", kl="k2").kl_coeff == 0.1


@pytest.mark.parametrize(
    ("options", "at", "says"),
    [
        ({"policy_loss": "reinforce", "clip_epsilon": 0.2}, "clip_epsilon", ["no effect", "reinforce"]),
        ({"policy_loss": "reinforce", "clip_low": 0.2}, "clip_low", ["no effect"]),
        ({"policy_loss": "vespo", "dual_clip": 3.0}, "dual_clip", ["no effect"]),
        ({"policy_loss": "grop"}, "policy_loss", ["did you mean 'grpo'"]),
        ({"kl": "none", "kl_coeff": 0.1}, "kl_coeff", ["no effect"]),
        ({"kl": "k3", "kl_coeff": 0}, "kl", ["no effect", "kl_coeff 0"]),
        ({"kl": "k9"}, "kl", ["k1, k2, k3"]),
        ({"clip_low": 0.1, "clip_high": 0.1, "clip_epsilon": 0.1}, "clip_epsilon", ["no effect"]),
        ({"correction": "tis_token", "anchor": "behaviour"}, "correction", ["twice"]),
        ({"advantage": "mean", "advantage_eps": 0.1}, "advantage_eps", ["divides by nothing"]),
        ({"advantage": "mean", "advantage_ddof": 0}, "advantage_ddof", ["divides by nothing"]),
        ({"advantage_ddof": True}, "advantage_ddof", []),
        ({"learning_rate": float("nan")}, "learning_rate", ["finite"]),
        ({"learning_rate": "1e-5"}, "learning_rate", ["number"]),
        ({"learning_rate": -1.0}, "learning_rate", ["greater than or equal to 0"]),
        ({"auto_load": 1}, "auto_load", ["boolean"]),
        ({"lora_rank": 0}, "lora_rank", ["1"]),
        ({"lora_rank": 2.5}, "lora_rank", ["integer"]),
        ({"lora_alpha": 1e308}, "lora_alpha", ["less than or equal to 1000000"]),
        ({"clip_epsilon": 1e308}, "clip_epsilon", ["float32"]),
        ({"temperature": 0}, "temperature", ["greater than 0"]),
        ({"minibatches": 0}, "minibatches", ["1"]),
        ({"betas": [0.9, 1.0]}, "betas", ["[0, 1)"]),
        ({"target_modules": []}, "target_modules", ["all-linear"]),
        ({"output_name": "base"}, "output_name", ["'base'"]),
        ({"output_name": "../../etc"}, "output_name", []),
        ({"output_name": "x" * 65}, "output_name", []),
        ({"base_adapter": "/etc/passwd"}, "base_adapter", ["'name@3'"]),
        ({"base_adapter": "math@"}, "base_adapter", ["'name@3'"]),
        ({"epochs": 3}, "epochs", ["did you mean iterations?"]),
        ({"lr": 3}, "lr", ["did you mean learning_rate?"]),
        ({"num_iterations": 3}, "num_iterations", ["did you mean iterations?"]),
        ({"num_train_epochs": 3}, "num_train_epochs", ["did you mean iterations?"]),
        ({"max_steps": 3}, "max_steps", ["did you mean iterations?"]),
        ({"reward_funcs": 3}, "reward_funcs", ["the keys of the configuration are", "output_name"]),
        ({"learning_rat": 3}, "learning_rat", ["did you mean learning_rate?"]),
        ({"output": "x"}, "output", ["did you mean output_name?"]),
    ],
)
def test_what_is_refused_says_where_and_what_is_valid(options, at, says):
    with pytest.raises(ConfigError) as caught:
        grpo(**options)
    message = str(caught.value)
    assert caught.value.field == at
    assert message.startswith(at) and all(part in message for part in says), message
    with pytest.raises(ValidationError) as invalid:  # as the server sees it, with the place in `loc`
        GrpoJobConfig.model_validate(options)
    found = [each for each in invalid.value.errors() if each["type"] != "default_factory_not_called"]
    assert [each["loc"][0] for each in found] == [at]


@pytest.mark.parametrize("kind", ["grpo", "sft"])
@pytest.mark.parametrize("key", ["parameters", "full_finetuning"])
def test_a_job_makes_adapters_alone(kind: str, key: str):
    with raises(ConfigError, field=key, kind="unknown"):
        parse_job_config(kind, {key: "all"})


def test_the_fields_of_grpo_are_told_from_those_of_sft():
    with raises(ConfigError, field="iterations", kind="unknown"):
        parse_job_config("sft", {"iterations": 2})
    with raises(ConfigError, field="kl_coeff", kind="unknown"):
        parse_job_config("sft", {"kl_coeff": 0.1})
    assert parse_job_config("sft", {"epochs": 2}).epochs == 2


@pytest.mark.parametrize(
    "options", [{}, {"policy_loss": "reinforce"}, {"clip_low": 0.1, "clip_high": 0.2}, SEED_EXAMPLE]
)
def test_what_the_ledger_keeps_is_the_same_configuration(options):
    config = grpo(**options, betas=[0.8, 0.9], target_modules=["q_proj"])
    assert parse_job_config("grpo", json.loads(json.dumps(config.model_dump(mode="json")))) == config
    assert GrpoJobConfig.model_validate_json(config.model_dump_json()) == config
    sft = SftJobConfig(epochs=2)
    assert parse_job_config("sft", json.loads(sft.model_dump_json())) == sft


def test_every_option_of_the_algorithm_is_there():
    assert AlgoConfig.model_fields.keys() <= GrpoJobConfig.model_fields.keys()


def test_steps():
    assert grpo(iterations=3, minibatches=4).steps(completions=8) == 12
    assert grpo(iterations=3, minibatches=4).steps(completions=2) == 6
    assert parse_job_config("sft", {"epochs": 2, "batch_size": 4}).steps(examples=9) == 6


def test_base_adapter_may_be_a_version_a_name_or_the_base():
    for text in ("math", "math@3", "base", "a.b-c_d@12"):
        assert grpo(base_adapter=text).base_adapter == text


def test_torch_is_not_imported():
    code = "import sys, groupwise.config.job, groupwise.store.ledger_schema; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("deadline", [3600, 0.5, "2030-01-31T18:00:00Z", "2030-01-31T18:00:00.5+02:00"])
def test_a_deadline_is_seconds_or_a_time(deadline):
    config = parse_job_config("grpo", {"deadline": deadline})
    assert parse_job_config("grpo", config.model_dump(mode="json")) == config
    times = {"2030-01-31T18:00:00Z": 1896112800.0, "2030-01-31T18:00:00.5+02:00": 1896105600.5}
    expected = times[deadline] if isinstance(deadline, str) else 100.0 + deadline
    assert deadline_at(config.deadline, posted=100.0) == expected


@pytest.mark.parametrize(
    "deadline", [0, -1, True, 1e12, math.nan, "soon", "2030-01-31", "2030-01-31T18:00:00", [1], {}]
)
def test_what_is_no_deadline_is_refused(deadline):
    with raises(ConfigError, field="deadline"):
        parse_job_config("sft", {"deadline": deadline})
