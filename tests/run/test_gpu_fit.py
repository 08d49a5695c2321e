"""What a run would choose and take on GPUs that are not here, and the place of a vLLM that it starts there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from cli_project import cli
from groupwise.cli.print_fit import _smaller
from groupwise.config.run import RunConfig, parse_config
from groupwise.config.world import World
from groupwise.errors import ConfigError
from groupwise.model.memory import GIB
from groupwise.run.controller_cost import WRITTEN, WRITTEN_AS_READ
from groupwise.run.gpu_fit import Cards, GpuFit, fit
from groupwise.run.memory_budget import ASLEEP
from groupwise.run.vllm_place import Placed, place_of, with_place
from wording import raises

DOCS = Path(__file__).parent.parent.parent / "docs"
sys.path.insert(0, str(DOCS))
import generate_hardware  # noqa: E402
from published_shapes import SHAPES, shape_dir  # noqa: E402

PARAMETERS = {"Qwen3-0.6B": 596_049_920, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360}  # as published


@pytest.fixture
def run(tmp_path: Path):
    """`run(shape, **sections)`: a configuration whose model is a config.json of this shape."""

    def make(shape: str = "Qwen3-0.6B", **sections) -> RunConfig:
        data = {"data": {"source": "rows.jsonl"}, "rewards": ["my:reward"], "model": shape_dir(shape, tmp_path)}
        return parse_config({**data, **sections})

    return make


@pytest.mark.parametrize("shape", PARAMETERS)
def test_parameters_are_those_that_were_published(run, shape: str):
    found = fit(run(shape), Cards(count=1, gib=80))
    assert found.parameters == PARAMETERS[shape]
    config = SHAPES[shape]
    widths = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    query, key = widths
    layer = (
        2 * (config.hidden_size + query)
        + 2 * (config.hidden_size + key)
        + 3 * (config.hidden_size + config.intermediate_size)
    )
    assert found.trained == 16 * config.num_hidden_layers * layer  # LoRA of rank 16 on all linear layers
    assert found.needed.weights == 2 * found.parameters


def test_of_experts_a_token_meets_those_that_are_chosen(run):
    found = fit(run("Qwen3-30B-A3B"), Cards(count=1, gib=80))
    assert found.parameters == pytest.approx(30.5e9, rel=0.01) and found.active == pytest.approx(3.3e9, rel=0.05)


@pytest.mark.parametrize(("config", "shape", "gpus"), [(k, *v) for k, v in generate_hardware.SHIPPED.items()])
def test_a_shipped_configuration_fits_the_gpu_that_it_names(config: str, shape: str, gpus: str):
    gib = gpus.partition("x")[2]
    head = (generate_hardware.CONFIGS / f"{config}.yaml").read_text().partition("\nname:")[0]
    assert f"{gib} GB" in head
    assert generate_hardware.found(config, shape, gpus).fits


@pytest.mark.parametrize("config", ["countdown-3b", "tool-use-4b"])
def test_a_head_that_names_a_smaller_one_with_nf4_is_right(config: str):
    shape, _ = generate_hardware.SHIPPED[config]
    assert generate_hardware.found(config, shape, "1x24", "quantization=nf4").fits


def test_the_page_has_what_is_found():
    written = generate_hardware.TARGET.read_text(encoding="utf-8")
    assert generate_hardware.page(written) == written, "run: python docs/generate_hardware.py"


def test_less_memory_is_smaller_passes_and_fewer_rows_and_then_none(run):
    rows, tokens = [], []
    for gib in (80, 24, 12, 1.5):
        found = fit(run(rollout={"max_tokens": 1024}), Cards(count=1, gib=gib))
        assert found.fits == (gib > 2)
        rows.append(found.rows)
        tokens.append(found.micro_tokens)
    assert rows == sorted(rows, reverse=True) and tokens == sorted(tokens, reverse=True)


def test_what_is_trained_is_shared_by_fsdp_and_not_by_ddp(run):
    whole = {"train": {"lora": None, "parallel": "ddp"}, "dtype": "float32"}
    cut = {"train": {"lora": None, "parallel": "fsdp"}, "dtype": "float32"}
    alone, shared = (fit(run(**each), Cards(count=8, gib=80)).needed.trained for each in (whole, cut))
    assert shared == alone // 8


def test_pairs_are_compared_with_a_reference_and_need_no_cache(run):
    """Without an adapter the reference is a copy of the weights; only an evaluation samples."""
    both = {"kind": "dpo", "rewards": []}
    full, adapted = (fit(run(**both, train=train), Cards(count=1, gib=80)) for train in ({"lora": None}, {}))
    assert full.needed.reference == full.needed.weights > 0 == adapted.needed.reference
    assert full.needed.kv_cache == full.rows == 0
    sft = fit(run(kind="sft", rewards=[], train={"lora": None}), Cards(count=1, gib=80))
    assert sft.needed.reference == sft.needed.kv_cache == 0
    evaluated = run(**{**both, "rewards": ["my:reward"]}, eval={"data": {"source": "held.jsonl"}})
    assert fit(evaluated, Cards(count=1, gib=80)).needed.kv_cache > 0


def test_time_is_a_range_and_less_with_more_gpus(run):
    one, eight = (fit(run(), Cards(count=count, gib=80)) for count in (1, 8))
    assert 0 < one.hours[0] < one.hours[1] and eight.hours[1] < one.hours[1]


CLUSTER = {"engine": "vllm", "vllm": {"urls": ["http://elsewhere"]}}
WHOLE = {"lora": None, "parallel": "fsdp", "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("Qwen3-8B", 8.19e9), ("Qwen3-32B", 32.8e9), ("Qwen3-30B-A3B", 30.5e9), ("Llama-3.3-70B", 70.6e9)],
)
def test_all_parameters_of_every_size_fit_64_gpus(run, shape: str, parameters: float):
    """Eight to a copy, but for 70B, whose moments and gradients want more; what then helps is named."""
    found = fit(run(shape, **CLUSTER, train=WHOLE), Cards(count=8, gib=80, nodes=8))
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.fits == (shape != "Llama-3.3-70B")
    if not found.fits:
        assert "train.shard_size: 64" in _smaller(found)
        assert fit(run(shape, **CLUSTER, train={**WHOLE, "shard_size": 64}), Cards(count=8, gib=80, nodes=8)).fits


def test_of_a_mixture_one_layer_with_its_experts_is_gathered(run):
    """Not all experts of the model: two layers of 48, and what is in none."""
    found = fit(run("Qwen3-30B-A3B", **CLUSTER, train={"parallel": "fsdp"}), Cards(count=8, gib=80))
    config = SHAPES["Qwen3-30B-A3B"]
    attention = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * 128 * config.hidden_size * config.moe_intermediate_size
    outside = 2 * config.vocab_size * config.hidden_size
    assert found.needed.shards == pytest.approx(2 * (found.parameters / 8 + outside + 2 * layer), rel=0.01)


def test_what_rank_0_does_grows_with_tokens_and_hardly_with_ranks(run):
    rollout = {"max_tokens": 4096, "prompts_per_step": 64, "group_size": 16}
    one, many = (
        fit(
            run("Qwen3-8B", **CLUSTER, rollout=rollout, train={"parallel": "fsdp"}), Cards(count=8, gib=80, nodes=nodes)
        )
        for nodes in (1, 8)
    )
    assert one.most_tokens == 64 * 16 * 4096
    assert {"answers", "texts", "rollouts", "orders", "packing"} < set(many.controller)
    assert one.controller["rollouts"] == many.controller["rollouts"] == pytest.approx(4.194304 * WRITTEN_AS_READ)
    assert one.controller["orders"] < many.controller["orders"] < 2 * one.controller["orders"]
    assert many.controller["packing"] < one.controller["packing"]
    streamed = rollout | {"in_flight_updates": True, "in_flight_cache": "recompute", "max_staleness": 1}
    told = fit(run("Qwen3-8B", **CLUSTER, rollout=streamed), Cards(count=8, gib=80)).controller
    assert told["answers"] > 5 * one.controller["answers"] and told["rollouts"] == pytest.approx(4.194304 * WRITTEN)
    local = fit(run(rollout=rollout), Cards(count=8, gib=80)).controller  # its numbers were never text
    assert "answers" not in local and local["rollouts"] == pytest.approx(4.194304 * WRITTEN)
    assert fit(run(kind="sft", rewards=[]), Cards(count=8, gib=80)).controller == {}


@pytest.mark.parametrize("text", ["80", "0x80", "1x0", "1x", "x80", "-1x80", "1x80x2"])
def test_what_is_no_number_of_gpus_is_refused(text: str):
    with pytest.raises(ConfigError):
        Cards.parse(text)


def test_units_may_be_said():
    assert Cards.parse("2x24GB") == Cards.parse("2X24") == Cards(count=2, gib=24)


# ---- vLLM ----
def gpus_of(placed: Placed) -> list[str]:
    assert placed.seats is not None
    return [",".join(seat.gpus) for seat in placed.seats.servers]


def test_vllm_gets_what_training_leaves_of_the_gpu(run):
    config = run("Qwen3-4B", engine="vllm", rollout={"max_tokens": 512})
    found = fit(config, Cards(count=1, gib=80))
    assert (found.learners, found.samplers, found.rows) == (1, 0, 0)
    assert found.vllm_share is not None and found.needed.total + found.vllm_share * 80 * GIB < 80 * GIB
    placed = place_of(config, visible=["0"], first=0, gib=80)
    assert (gpus_of(placed), placed.vllm.gpu_memory_utilization) == (["0"], found.vllm_share)


def test_and_is_refused_where_that_is_too_little(run):
    config = run("Qwen3-8B", engine="vllm")
    assert not fit(config, Cards(count=1, gib=24)).fits
    with raises(ConfigError) as caught:
        place_of(config, visible=["0"], first=0, gib=24)
    assert caught.value.field == "vllm.gpu_memory_utilization"


def test_a_vllm_that_sleeps_leaves_training_its_memory_and_gets_that_of_training(run):
    """Each has what the other does not keep: 4B fits 24 GiB so, and does not where both are there at once."""
    colocated = {"engine": "vllm", "rollout": {"max_tokens": 512}}
    awake, asleep = (
        fit(run("Qwen3-4B", vllm={"mode": "colocate", "sleep": sleep}, **colocated), Cards(count=1, gib=24))
        for sleep in (False, True)
    )
    assert not awake.fits and awake.vllm_share == 0 and not awake.vllm_sleeps and awake.needed.vllm == 0
    assert asleep.fits and asleep.vllm_sleeps and asleep.needed.vllm == ASLEEP
    assert asleep.vllm_share is not None
    kept = asleep.needed.weights + asleep.needed.trained
    assert kept + asleep.vllm_share * 24 * GIB < 24 * GIB and asleep.needed.total <= asleep.available
    placed = place_of(asleep.config, visible=["0"], first=0, gib=24)
    assert placed.seats is None and placed.vllm.gpu_memory_utilization == asleep.vllm_share
    ahead = {"mode": "colocate", "sleep": True}
    config = run("Qwen3-4B", engine="vllm", vllm=ahead, rollout={"max_tokens": 512, "max_staleness": 1})
    assert not fit(config, Cards(count=1, gib=24)).vllm_sleeps  # something is sampled while it trains


@pytest.mark.parametrize(
    ("visible", "first", "devices", "tensor_parallel", "gpus"),
    [
        (["0", "1"], 0, None, 1, ["1"]),
        (["0", "1"], 1, None, 1, ["0"]),  # device: cuda:1
        (["3", "5", "6", "7"], 0, 2, 2, ["6,7"]),
        (["0", "1", "2", "3"], 0, 1, 2, ["1,2"]),
        (["0", "1", "2", "3"], 0, 2, 1, ["2", "3"]),
    ],
)
def test_vllm_gets_gpus_that_no_learner_uses(run, visible, first, devices, tensor_parallel, gpus):
    config = run(engine="vllm", vllm={"tensor_parallel_size": tensor_parallel}, train={"devices": devices})
    placed = place_of(config, visible=visible, first=first, gib=80)
    assert (gpus_of(placed), placed.vllm.gpu_memory_utilization) == (gpus, 0.9)
    found = fit(config, Cards(count=len(visible), gib=80))
    assert found.samplers == tensor_parallel * len(gpus) and found.vllm_share is None


def test_servers_on_several_machines_are_counted_as_they_are_placed(run):
    """24 learners and eight servers of five GPUs each on eight machines of eight; 47 servers of one are too many."""
    config = run(engine="vllm", vllm={"tensor_parallel_size": 5}, train={"devices": 24})
    here = World(rank=0, size=24, local_size=3)
    placed = place_of(config, visible=[str(number) for number in range(8)], first=0, gib=80, here=here)
    assert placed.seats is not None and gpus_of(placed) == ["3,4,5,6,7"] * 8
    assert [seat.node for seat in placed.seats.servers] == list(range(8))
    assert fit(config, Cards(count=8, gib=80, nodes=8)).samplers == 40
    with raises(ConfigError, field="vllm.servers"):
        fit(run(engine="vllm", vllm={"servers": 47}, train={"devices": 24}), Cards(count=8, gib=80, nodes=8))
    shared = fit(run(engine="vllm", vllm={"servers": 12, "tensor_parallel_size": 2}), Cards(count=8, gib=80, nodes=4))
    assert (shared.learners, shared.samplers) == (8, 24)


def test_learners_on_every_gpu_leave_a_share_of_theirs(run):
    config = run("Qwen3-4B", engine="vllm", train={"devices": 2}, rollout={"max_tokens": 512})
    placed = place_of(config, visible=["0", "1"], first=0, gib=80)
    assert gpus_of(placed) == ["0"] and placed.seats is not None and placed.seats.shared
    assert placed.vllm.gpu_memory_utilization == fit(config, Cards(count=2, gib=80)).vllm_share


def test_a_vllm_of_several_gpus_shares_none(run):
    config = run(engine="vllm", vllm={"tensor_parallel_size": 2}, train={"devices": 2})
    with pytest.raises(ConfigError):
        place_of(config, visible=["0", "1", "2"], first=0, gib=80)


def test_what_the_configuration_says_goes_before(run):
    said = {"gpus": "4", "gpu_memory_utilization": 0.35}
    placed = place_of(run(engine="vllm", vllm=said), visible=["0"], first=0, gib=24)
    assert (gpus_of(placed), placed.vllm.gpu_memory_utilization) == (["4"], 0.35)


def test_elsewhere_nothing_is_changed(run):
    for config in (run(), run(engine="vllm", vllm={"urls": ["http://a"]})):
        assert with_place(config, torch.device("cpu")) == (config, None)
    on_cpu, seats = with_place(run(engine="vllm", vllm={"servers": 2}), torch.device("cpu"))
    assert on_cpu.vllm.gpu_memory_utilization is None and seats is not None
    assert [seat.gpus for seat in seats.servers] == [(), ()]


# ---- the command ----
@pytest.mark.parametrize(("gpus", "code"), [("1x80", 0), ("1x2", 2)])
def test_the_command_says_so(run, tmp_path: Path, gpus: str, code: int):
    model = shape_dir("Qwen3-4B", tmp_path)
    (tmp_path / "run.yaml").write_text("data: {source: none.jsonl}\nrewards: [none:none]\n")  # nothing of it is read
    words = ("check", str(tmp_path / "run.yaml"), "--gpus", gpus, f"model={model}")
    shown, said = cli(*words), cli(*words, "--json")
    assert shown.exit_code == said.exit_code == code
    assert "4.02B parameters" in shown.stdout and ("quantization: nf4" in shown.stderr) == bool(code)
    found = json.loads(said.stdout)
    assert found["fits"] == (not code) and found["memory_bytes"]["total"] > found["memory_bytes"]["weights"]


def test_what_would_make_it_smaller_is_what_could(run):
    """Experts are not quantised, what is set already is not named again, and small parts of a large lack are no way."""
    mixture, dense = (fit(run(shape), Cards(count=1, gib=12)) for shape in ("Qwen3-30B-A3B", "Qwen3-8B"))
    assert mixture.weights_nf4 is None and dense.weights_nf4 is not None
    assert dense.weights_nf4 < 0.4 * dense.needed.weights
    asked = {"train": {"gradient_checkpointing": True}}
    for found in (mixture, dense, fit(run("Qwen3-30B-A3B", **asked), Cards(count=1, gib=60))):
        assert not found.fits and "gradient_checkpointing" not in _smaller(found)
        assert ("nf4" in _smaller(found)) == (found is dense)
    assert fit(run("Qwen3-8B", engine="vllm"), Cards(count=1, gib=12)).weights_nf4 is None


def test_more_gpus_than_there_are_is_an_error(run):
    with pytest.raises(ConfigError):
        fit(run(engine="vllm", vllm={"tensor_parallel_size": 4}, train={"devices": 6}), Cards(count=8, gib=80))
    assert isinstance(fit(run(), Cards(count=1, gib=80)), GpuFit)


def test_70b_on_eight_machines_of_eight_gpus_has_room_on_rank_0_too(run, tmp_path: Path):
    """LoRA over a base that is cut within each machine and copied between them, sampled by vLLM servers elsewhere."""
    place = tmp_path / "70b"
    LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
    ).save_pretrained(place)
    sections = {
        "model": str(place),
        "engine": "vllm",
        "vllm": {"urls": ["http://elsewhere"]},
        "train": {"parallel": "fsdp", "gradient_checkpointing": True},
    }
    found = fit(run(**sections), Cards(count=8, gib=80, nodes=8))
    assert found.learners == 64 and found.config.train.shard_size == 8 and found.fits
    assert found.needed.weights == 0 and found.needed.total < 80e9
    rest = 2 * (found.parameters - 80 * 855_638_016)  # bytes of what is in no layer's matrices
    gathered = rest + max(rest, 2 * 2 * 855_638_016)
    assert found.needed.shards == pytest.approx(2 * found.parameters / 8 + gathered, rel=1e-3)
    everywhere = {**sections, "train": {**sections["train"], "shard_size": 64}}
    smaller = fit(run(**everywhere), Cards(count=8, gib=80, nodes=8)).needed.shards
    assert smaller == pytest.approx(2 * found.parameters / 64 + gathered, rel=1e-3)
    whole = fit(run(**{**sections, "engine": "local", "vllm": {}}), Cards(count=8, gib=80, nodes=8))
    assert not whole.fits and whole.needed.weights == 2 * found.parameters
