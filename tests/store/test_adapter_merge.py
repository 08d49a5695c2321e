"""Merged adapters against PEFT's own merges where it has them, and against weight updates computed one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import AdapterError
from groupwise.store.files import CONFIG, WEIGHTS, check_adapter
from groupwise.store.merge import MergeMode, MergeReport, WeightedAdapter, merge_adapters
from wording import raises

PREFIX = "base_model.model."


def updates(directory: Path) -> dict[str, torch.Tensor]:
    """Module -> (alpha / r) B A, in float64."""
    config, tensors = json.loads((directory / CONFIG).read_text()), load_file(directory / WEIGHTS)
    names = {key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in tensors}
    pairs = {n: [tensors[f"{PREFIX}{n}.lora_{half}.weight"].double() for half in "BA"] for n in names}
    return {name: config["lora_alpha"] / a.shape[0] * (b @ a) for name, (b, a) in pairs.items()}


def assert_same_updates(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, atol: float = 1e-9):
    assert mine.keys() == theirs.keys()
    for name, update in mine.items():
        torch.testing.assert_close(update, theirs[name].double(), atol=atol, rtol=1e-6)


@pytest.fixture
def sources(make_base, make_adapter) -> list[Path]:
    base = make_base()
    return [make_adapter(base, seed=1, rank=3), make_adapter(base, seed=2, rank=2), make_adapter(base, seed=3, rank=4)]


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., MergeReport]:
    """Merges into tmp_path / "merged", which is checked as every published adapter is."""

    def run(sources: list[Path], weights: list[float], mode: str, **options) -> MergeReport:
        (tmp_path / "merged").mkdir(exist_ok=True)
        pairs = [WeightedAdapter(*pair) for pair in zip(sources, weights, strict=True)]
        report = merge_adapters(pairs, tmp_path / "merged", mode=MergeMode(mode), **options)
        check_adapter(tmp_path / "merged")
        return report

    return run


@pytest.fixture
def peft_updates(make_base, sources: list[Path]) -> Callable[..., dict[str, torch.Tensor]]:
    """The updates of PEFT's `add_weighted_adapter` over `sources`."""

    def run(weights: list[float], **options) -> dict[str, torch.Tensor]:
        model = peft.PeftModel.from_pretrained(make_base().model, str(sources[0]), "0", autocast_adapter_dtype=False)
        for i in range(1, len(weights)):
            model.load_adapter(str(sources[i]), str(i), autocast_adapter_dtype=False)
        names = [str(i) for i in range(len(weights))]
        model.base_model.add_weighted_adapter(names, weights, "merged", **options)  # pyright: ignore
        layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
        return {name: layer.get_delta_weight("merged").detach() for name, layer in layers.items()}

    return run


# --- against PEFT ---


def test_concat_is_pefts_cat(sources, merge, peft_updates, tmp_path: Path):
    weights = [0.7, -1.3, 2.0]
    report = merge(sources, weights, "concat")
    assert (report.rank, report.relative_error) == (9, 0.0)
    assert_same_updates(updates(tmp_path / "merged"), peft_updates(weights, combination_type="cat"))


def test_weighted_average_at_a_smaller_rank_is_pefts_svd(sources, merge, peft_updates, tmp_path: Path):
    report = merge(sources, [3.0, 1.0, 4.0], "weighted_average", rank=4)
    theirs = peft_updates([3 / 8, 1 / 8, 4 / 8], combination_type="svd", svd_rank=4)
    assert_same_updates(updates(tmp_path / "merged"), theirs)
    assert report.rank == 4 and 0.01 < report.relative_error < 0.9


@pytest.mark.parametrize("density", [0.2, 0.6])
def test_ties_is_pefts_ties_svd(sources, merge, peft_updates, tmp_path: Path, density: float):
    """With equal weights: PEFT's other weights do not enter the election, and an average of all-0.5 is halved."""
    merge(sources, [2.0, 2.0, 2.0], "ties", density=density, rank=9)
    theirs = peft_updates([1.0, 1.0, 1.0], combination_type="ties_svd", density=density, svd_rank=9)
    assert_same_updates(updates(tmp_path / "merged"), theirs)


def test_peft_loads_a_merge_and_gives_the_logits_of_the_averaged_updates(make_base, sources, merge, tmp_path: Path):
    """The merged directory loads in PEFT, and its logits are those of a base whose weights were changed by hand."""
    merge(sources, [1.0, 3.0, 1.0], "weighted_average")
    merged = peft.PeftModel.from_pretrained(make_base().model, str(tmp_path / "merged"), autocast_adapter_dtype=False)
    by_hand = make_base().model
    for weight, source in zip([0.2, 0.6, 0.2], sources, strict=True):
        for name, update in updates(source).items():
            by_hand.get_submodule(name).weight.data += weight * update
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged(input_ids=ids).logits, by_hand(input_ids=ids).logits, atol=1e-9, rtol=1e-7)


# --- against the updates one by one ---


def test_weighted_average_is_the_average_of_the_updates(sources, merge, tmp_path: Path):
    report = merge(sources, [1.0, 2.0, 1.0], "weighted_average")
    each = [updates(source) for source in sources]
    expected = {name: (each[0][name] + 2 * each[1][name] + each[2][name]) / 4 for name in each[0]}
    assert_same_updates(updates(tmp_path / "merged"), expected)
    assert (report.tensors, report.rank, report.relative_error) == (2 * len(expected), 9, 0.0)


def test_averaging_the_factors_would_be_wrong(make_base, make_adapter, merge, tmp_path: Path):
    """The one thing the docstring claims: the average of the factors is another update, and depends on their basis."""
    base = make_base()
    first, second = make_adapter(base, seed=1), make_adapter(base, seed=2)
    merge([first, second], [1.0, 1.0], "weighted_average")
    name = "model.layers.0.mlp.up_proj"
    exact = (updates(first)[name] + updates(second)[name]) / 2
    torch.testing.assert_close(updates(tmp_path / "merged")[name], exact)
    factors = [load_file(d / WEIGHTS) for d in (first, second)]

    def average_of_factors(turn: torch.Tensor) -> torch.Tensor:
        a, b = (f"{PREFIX}{name}.lora_{half}.weight" for half in "AB")
        turned = factors[1][b] @ turn, turn.inverse() @ factors[1][a]  # the same adapter for any `turn`
        return 2 * ((factors[0][b] + turned[0]) / 2) @ ((factors[0][a] + turned[1]) / 2)

    plain = average_of_factors(torch.eye(3).double())
    negated = average_of_factors(-torch.eye(3).double())
    assert (plain - exact).norm() > 0.3 * exact.norm() and (plain - negated).norm() > 0.3 * exact.norm()


def test_an_adapter_averaged_with_itself_is_itself(sources, merge, tmp_path: Path):
    report = merge([sources[0]] * 3, [0.3, 5.0, 1.0], "weighted_average", rank=3)
    assert_same_updates(updates(tmp_path / "merged"), updates(sources[0]))
    assert report.relative_error == pytest.approx(0.0, abs=1e-9)


def test_an_adapter_minus_itself_is_nothing(sources, merge, tmp_path: Path):
    merge([sources[0]] * 2, [1.0, -1.0], "concat")
    assert all(float(update.abs().max()) < 1e-12 for update in updates(tmp_path / "merged").values())


def test_ties_by_hand(tmp_path: Path, merge):
    """One 2 x 2 module, rank 2, weights 1 and 3; every entry worked out below."""
    first = torch.tensor([[4.0, -1.0], [2.0, 0.5]], dtype=torch.float64)
    second = torch.tensor([[2.0, 3.0], [-1.0, 0.1]], dtype=torch.float64)
    directories = [plain_adapter(tmp_path / str(i), {"m": m}) for i, m in enumerate((first, second))]
    merge(directories, [1.0, 3.0], "ties", density=0.75, rank=2)
    # trimmed to the three largest: [[4, -1], [2, 0]] and [[2, 3], [-1, 0]]
    # elected sign of 1 x first + 3 x second: [[10, 8], [-1, 0]] -> [[+, +], [-, 0]]
    expected = torch.tensor([[(4 + 3 * 2) / 4, 3.0], [-1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(updates(tmp_path / "merged")["m"], expected)


def test_ties_says_what_rounding_lost(sources, merge, tmp_path: Path):
    full, small = (merge(sources, [1.0] * 3, "ties", density=0.2, rank=rank).relative_error for rank in (9, 2))
    assert 0 < full < small < 1
    merge(sources, [1.0] * 3, "ties", density=0.2, rank=9)
    kept = updates(tmp_path / "merged")
    merge(sources, [1.0] * 3, "ties", density=0.2, rank=2)
    difference = sum(float((kept[n] - u).square().sum()) for n, u in updates(tmp_path / "merged").items())
    norm = sum(float(u.square().sum()) for u in kept.values()) / (1 - full**2)
    assert small**2 == pytest.approx(full**2 + difference / norm, rel=1e-6)  # Pythagoras: the parts are orthogonal


def test_rounding_a_large_module_is_nearly_the_best(tmp_path: Path, merge):
    """Where the subspace iteration is not exact: a dense 300 x 200 update against LAPACK."""
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(300, 40, generator=g).double(), torch.randn(40, 200, generator=g).double()
    update = (u * torch.logspace(0, -1, 40).double()) @ v
    report = merge([plain_adapter(tmp_path / "0", {"m": update})], [1.0], "ties", density=1.0, rank=5)
    s = torch.linalg.svdvals(update)
    best = float((s[5:].square().sum() / s.square().sum()).sqrt())
    assert best <= report.relative_error + 1e-9 and report.relative_error == pytest.approx(best, rel=1e-3)


# --- sources that differ ---


def test_targets_that_differ(make_base, tmp_path: Path, merge):
    """A module that a source does not target has the update 0 there; PEFT loads the union."""
    g = torch.Generator().manual_seed(0)
    q, k = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
    first = {q: torch.randn(32, 32, generator=g), k: torch.randn(16, 32, generator=g)}
    second = {k: torch.randn(16, 32, generator=g)}
    directories = [plain_adapter(tmp_path / str(i), each) for i, each in enumerate((first, second))]
    merge(directories, [1.0, 1.0], "weighted_average")
    merged = updates(tmp_path / "merged")
    assert_same_updates(merged, {q: first[q] / 2, k: (first[k] + second[k]) / 2}, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(make_base(dtype=torch.float32).model, str(tmp_path / "merged"))
    adapted = {n for n, m in loaded.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert adapted == {q, k}


def test_scales_of_every_kind(make_base, tmp_path: Path, merge):
    """alpha, rank-stabilised scaling and patterns: PEFT's update of each source is what enters the sum."""
    directories, each = [], []
    for i, options in enumerate(
        ({"r": 4, "lora_alpha": 3}, {"r": 4, "lora_alpha": 6, "use_rslora": True},
         {"r": 2, "rank_pattern": {"v_proj": 5}, "alpha_pattern": {"layers.1.self_attn.v_proj": 9}})
    ):  # fmt: skip
        torch.manual_seed(i)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
        model = peft.get_peft_model(make_base().model, config, autocast_adapter_dtype=False)
        model.save_pretrained(str(tmp_path / str(i)))
        directories.append(tmp_path / str(i))
        layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
        each.append({name: layer.get_delta_weight("default").detach() for name, layer in layers.items()})
    report = merge(directories, [1.0, -2.0, 0.5], "concat")
    expected = {n: each[0][n] - 2 * each[1][n] + 0.5 * each[2][n] for n in each[0]}
    assert_same_updates(updates(tmp_path / "merged"), expected)
    assert report.rank == 4 + 4 + 5


def test_gpt2s_transposed_layers(make_base, make_adapter, merge, tmp_path: Path):
    base = make_base("gpt2")
    directories = [make_adapter(base, seed=seed) for seed in (1, 2)]
    merge(directories, [1.0, 1.0], "weighted_average")
    merged = peft.PeftModel.from_pretrained(
        make_base("gpt2").model, str(tmp_path / "merged"), autocast_adapter_dtype=False
    )
    by_hand = make_base("gpt2").model
    for directory in directories:
        for name, update in updates(directory).items():
            by_hand.get_submodule(name).weight.data += 0.5 * update.T
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged(input_ids=ids).logits, by_hand(input_ids=ids).logits, atol=1e-9, rtol=1e-7)


def test_16_bit_sources_are_merged_in_32(tmp_path: Path, merge):
    directory = plain_adapter(tmp_path / "0", {"m": torch.full((4, 4), 1 / 3)}, dtype=torch.bfloat16)
    merge([directory] * 2, [1.0, 1.0], "weighted_average")
    assert {t.dtype for t in load_file(tmp_path / "merged" / WEIGHTS).values()} == {torch.float32}


def plain_adapter(directory: Path, matrices: dict[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> Path:
    """An adapter of scale 1 whose updates are `matrices`: B is the matrix, A is the identity."""
    directory.mkdir()
    rank = max(m.shape[1] for m in matrices.values())
    tensors = {}
    for name, m in matrices.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.eye(m.shape[1], dtype=dtype or m.dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = m.to(dtype or m.dtype).contiguous()
    save_file(tensors, directory / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(matrices)}
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


# --- what cannot be merged ---


@pytest.mark.parametrize(
    ("weights", "mode", "options"),
    [
        ([], "concat", {}),
        ([1.0] * 17, "concat", {}),
        ([1.0, -1.0], "weighted_average", {}),
        ([1.0, 0.0], "ties", {}),
        ([1.0, 0.0], "concat", {}),
        ([1.0, float("nan")], "concat", {}),
        ([1.0, float("inf")], "weighted_average", {}),
        ([1.0, 1.0], "concat", {"density": 0.5}),
        ([1.0, 1.0], "ties", {"density": 0.0}),
        ([1.0, 1.0], "ties", {"density": 1.5}),
        ([1.0, 1.0], "ties", {"density": float("nan")}),
        ([1.0, 1.0], "concat", {"rank": 0}),
        ([1.0, 1.0], "concat", {"rank": 7}),
    ],
)
def test_refused(sources, merge, tmp_path: Path, weights, mode: str, options):
    with raises(AdapterError):
        merge([sources[0]] * len(weights), weights, mode, **options)
    assert not list((tmp_path / "merged").iterdir())


def test_shapes_that_differ(tmp_path: Path, merge):
    directories = [plain_adapter(tmp_path / str(i), {"a.q_proj": torch.ones(4, i + 2)}) for i in range(2)]
    with raises(AdapterError):
        merge(directories, [1.0, 1.0], "concat")


def test_too_large_a_result_is_refused_before_it_is_made(sources, merge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("groupwise.store.merge.MAX_WEIGHTS_BYTES", 50_000)
    with raises(AdapterError):
        merge([sources[2]] * 3, [1.0] * 3, "concat")


def test_damaged_and_odd_sources(sources, merge, tmp_path: Path):
    odd = plain_adapter(tmp_path / "odd", {"m": torch.ones(2, 2)})
    tensors = load_file(odd / WEIGHTS)
    save_file(tensors | {f"{PREFIX}m.lora_B.bias": torch.ones(2)}, odd / WEIGHTS)
    with raises(AdapterError):
        merge([odd], [1.0], "concat")
    (odd / WEIGHTS).write_bytes(b"no")
    with raises(AdapterError):
        merge([odd], [1.0], "concat")


def test_the_same_merge_has_the_same_bytes(sources, merge, tmp_path: Path):
    made = []
    for _ in range(2):
        merge(sources, [1.0, 2.0, 3.0], "ties", rank=4)
        made.append((tmp_path / "merged" / WEIGHTS).read_bytes())
    assert made[0] == made[1]


@pytest.mark.filterwarnings("ignore:.*cannot be trained in packed rows:UserWarning")
def test_layers_that_peft_must_find_by_their_weights_are_named_so(make_base, make_adapter, merge, tmp_path: Path):
    """In a mixture where PEFT takes `down_proj` for the routed experts, and the adapters are of the shared one."""
    base = make_base("qwen3_next")
    one, other = (make_adapter(base, seed=seed) for seed in (1, 2))
    merge([one, other], [1.0, 0.5], "concat")
    config = json.loads((tmp_path / "merged" / CONFIG).read_text())
    assert len(config["target_parameters"]) == 6 and all(
        name.endswith("_proj.weight") and "shared_expert." in name for name in config["target_parameters"]
    )
    ids = torch.arange(3, 12)[None]
    model = peft.PeftModel.from_pretrained(make_base("qwen3_next").model, str(one), "one", autocast_adapter_dtype=False)
    model.load_adapter(str(other), "other", autocast_adapter_dtype=False)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and "other" in module.scaling:
            module.scaling["other"] *= 0.5
    model.base_model.set_adapter(["one", "other"])
    merged = peft.PeftModel.from_pretrained(
        make_base("qwen3_next").model, str(tmp_path / "merged"), autocast_adapter_dtype=False
    )
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6, rtol=1e-6)
