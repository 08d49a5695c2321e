"""Models that see: sampled and trained in packed rows as their own forward has it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import CONFIG_MAPPING

from groupwise.config.lora import LoraSpec
from groupwise.config.trained import PARTS
from groupwise.engine.local import LocalEngine
from groupwise.errors import ChatError, DataError, FieldError, ModelError
from groupwise.model.adaptable import adapted_modules
from groupwise.model.chat import decode, encode_prompt
from groupwise.model.image_tokens import FIRST, is_of_image, vision_of
from groupwise.model.load import LoadedModel, load_model, share_weights
from groupwise.model.packed_check import look, packed_tolerance, why_blind
from groupwise.model.packing import micro_batches
from groupwise.model.supervised import encode_supervised
from groupwise.model.vision import Features, Vision, linear_of_eyes, parameters_of_eyes, train_parts
from groupwise.pictures import Picture, read_picture
from groupwise.tasks.transcript import Transcript
from groupwise.train.forward import packed_logprobs
from groupwise.train.lora import add_lora
from groupwise.types import (
    Completion,
    FinishReason,
    Message,
    PolicyVersion,
    Prompt,
    Sample,
    SamplingParams,
    SamplingRequest,
)
from seeing_checks import ONE, TWO, adapter_of, asked, eyes, facts_of, own_logits, sampled, samples_of, trained, user
from seeing_models import FAMILIES, WITH_TORCHVISION, drawn, load_seeing, save_seeing
from slow_cases import crossed, slow_but
from wording import raises

Load = Callable[..., LoadedModel]
ALIKE = {"glm46v", "llava_next", "qwen3_5_moe"}  # whose text decoder or tower another family has
ROUNDED = ("qwen3_5", "qwen3_5_moe", "glm4v_moe")  # of recurrent layers the states, of GLM's experts the router
EYES = ("vision", "projector", "all-linear")
THROUGHOUT = {"qwen2_5_vl", "gemma3"}  # in every combination: images in line, and images whose tokens see each other

pytestmark = pytest.mark.filterwarnings("ignore:.* has recurrent layers:UserWarning")


@pytest.fixture(autouse=True)
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have float64 be float64 throughout, in all threads, where transformers rounds to float32: what it rounds is not
    the same in a batch of another shape, by as much as the processor's products differ."""
    if (getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")) not in ROUNDED:
        return
    to, as_float, as_type = Tensor.to, Tensor.float, Tensor.type

    def exact(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return to(x, *args, **options)

    monkeypatch.setattr(Tensor, "to", exact)
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else as_float(x))
    monkeypatch.setattr(Tensor, "type", lambda x, to: as_type(x, torch.float64 if to is torch.float32 else to))


def hardest(name: str, turns: int) -> bool:
    """Whether a family's gradients are over as many images as it takes, and nobody else's."""
    return name not in ALIKE and turns == (1 if name == "llava_onevision" else 2)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    kept: dict[tuple[str, str], LoadedModel] = {}

    def loaded(name: str, dtype: str = "float64") -> LoadedModel:
        if (name, dtype) not in kept:
            kept[name, dtype] = load_seeing(name, tmp_path_factory.mktemp(name), dtype=dtype)
        return kept[name, dtype]

    return loaded


@pytest.mark.parametrize("name", FAMILIES)
def test_sampler_and_trainer_are_the_models_own_forward(load: Load, name: str) -> None:
    base = load(name)
    pictures = [ONE] if name == "llava_onevision" else [ONE, TWO]  # which cuts several otherwise
    prompt = asked(base, user(*pictures, "Same?"))
    said = sampled(base, prompt)
    found = trained(share_weights(base.model), samples_of(prompt, said))
    padded = trained(share_weights(base.model), samples_of(prompt, said), packed=False)
    for each, packed, plain in zip(said, found, padded, strict=True):
        with torch.no_grad():
            own = own_logits(base, (*prompt, *each.token_ids), pictures).log_softmax(-1)
        expected = [float(own[len(prompt) - 1 + i, token]) for i, token in enumerate(each.token_ids)]
        assert each.logprobs == pytest.approx(expected, abs=1e-9)
        assert packed == pytest.approx(expected, abs=1e-9)
        assert eyes(base).both_ways or plain == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "turns", "targets"),
    crossed(
        FAMILIES,
        (1, 2),
        ("all-linear", EYES),
        quick=lambda name, turns, targets: (hardest(name, turns) and targets == EYES) or name in THROUGHOUT,
    ),
)
def test_gradients_of_an_adapter_are_those_of_the_plain_forward(
    load: Load, name: str, turns: int, targets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of four over one image, and of four over two images in two turns. What changes the eyes is trained too,
    and an image encoded once for its group."""
    if name == "llava_onevision" and turns == 2:
        pytest.skip("one image a prompt")
    base = load(name)
    if name == "gemma3" and targets != "all-linear":
        targets = ("vision", "all-linear")  # its projector is a product without a linear layer
    messages = [user(ONE, "How many?")]
    messages += [{"role": "assistant", "content": "2"}, user(TWO, "And here?")] if turns == 2 else []
    prompt = asked(base, *messages)
    samples = samples_of(prompt, sampled(base, prompt))
    gradients = list[dict[str, Tensor]]()
    for packed in (True, False):
        model = share_weights(base.model)
        add_lora(model, LoraSpec(rank=4, targets=targets), seed=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view_as(parameter) / 9
        total = torch.zeros((), dtype=torch.float64)
        if packed:
            (batch,) = micro_batches(samples, token_budget=10_000)
            runs = count_calls(eyes(base), "computed", monkeypatch)
            total = (packed_logprobs(model, batch)[0] * batch.advantages_N).sum()
            assert targets == "all-linear" or len(runs) == turns
        else:
            for sample in samples:
                row = (*prompt, *sample.completion_ids)
                own = _own_of_twin(base, model, row).log_softmax(-1)
                at = torch.arange(len(prompt) - 1, len(row) - 1)
                total = total + own[at, torch.tensor(sample.completion_ids)].sum() * sample.advantage
        total.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    ours, own = gradients
    assert ours and ours.keys() == own.keys()
    assert targets == "all-linear" or {*linear_of_eyes(base.model), *linear_of_eyes(base.model, projector=True)} <= {
        name_of.partition(".lora_")[0] for name_of in ours
    }
    for name_of, gradient in ours.items():  # norms are computed in float32, whatever the model is in
        assert float((gradient - own[name_of]).norm() / own[name_of].norm()) < 1e-6, name_of


@pytest.mark.parametrize(
    ("name", "turns"),
    crossed(FAMILIES, (1, 2), quick=lambda name, turns: hardest(name, turns) or name in THROUGHOUT),
)
def test_gradients_of_all_parameters_are_those_of_the_plain_forward(
    load: Load, name: str, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower's embeddings included, and the LM head's; an image is encoded once for its group."""
    if name == "llava_onevision" and turns == 2:
        pytest.skip("one image a prompt")
    base = load(name)
    messages = [user(ONE, "How many?")]
    messages += [{"role": "assistant", "content": "2"}, user(TWO, "And here?")] if turns == 2 else []
    prompt = asked(base, *messages)
    samples = samples_of(prompt, sampled(base, prompt))
    (batch,) = micro_batches(samples, token_budget=10_000)
    model = share_weights(base.model)
    train_parts(model, PARTS)
    try:
        runs = count_calls(eyes(base), "computed", monkeypatch)
        total = (packed_logprobs(model, batch)[0] * batch.advantages_N).sum()
        assert len(runs) == turns
        ours = _gradients(model, total)
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            row = (*prompt, *sample.completion_ids)
            own = _own_of_twin(base, model, row).log_softmax(-1)
            at = torch.arange(len(prompt) - 1, len(row) - 1)
            total = total + own[at, torch.tensor(sample.completion_ids)].sum() * sample.advantage
        own = _gradients(model, total)
    finally:
        model.requires_grad_(False)
    assert ours.keys() == own.keys()
    seeing = {id(parameter) for parameter in parameters_of_eyes(model)}
    trained_eyes = {each for each, parameter in model.named_parameters() if id(parameter) in seeing and each in ours}
    assert any("embed" in each for each in trained_eyes) and {*ours} > trained_eyes
    for name_of, gradient in ours.items():  # a key's bias has none but rounding's
        assert float((gradient - own[name_of]).norm()) < 1e-6 * float(own[name_of].norm()) + 1e-11, name_of


def _gradients(model: Any, total: Tensor) -> dict[str, Tensor]:
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_of_models_says_how_an_image_is_placed(load: Load, name: str) -> None:
    row = json.loads((Path(__file__).parents[2] / "docs" / "models_seeing.json").read_text(encoding="utf-8"))[name]
    facts = facts_of(name, load(name))
    assert {key: row[key] for key in facts} == facts, "the head of tests/slow/test_seeing_families.py says how"
    assert (row["sampled"], row["trained"], row["images"]) == ("packed",) * 3


def test_what_is_kept_of_an_image_follows_the_tower(load: Load) -> None:
    """A tower that trains is another after a step; a frozen one is not run again."""
    base = load("smolvlm")
    prompt, vision = asked(base, user(ONE, "How many?")), eyes(base)
    (token, *_) = (each for each in prompt if is_of_image(each))
    kept = vision.features(token)
    vision.changed()
    assert vision.features(token) is kept
    (first, *_) = (each for each in parameters_of_eyes(base.model) if each.ndim > 1)
    before = first.detach().clone()
    train_parts(base.model, ("projector", "vision"))
    try:
        with torch.no_grad():
            first.mul_(2)
        vision.changed()
        assert not torch.allclose(vision.features(token).rows, kept.rows)
        first.data.copy_(before)
        vision.changed()
        assert torch.equal(vision.features(token).rows, kept.rows)
    finally:
        base.model.requires_grad_(False)


def test_a_picture_is_decoded_once_for_the_passes_over_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load("qwen2_5_vl")
    other = read_picture(drawn(52, 36, seed=7))
    prompt = asked(base, user(other, "How many?"))
    samples = samples_of(prompt, sampled(base, prompt))
    prepared = count_calls(eyes(base), "_prepared", monkeypatch)
    model = share_weights(base.model)
    add_lora(model, LoraSpec(rank=4, targets="vision"), seed=0)
    first = trained(model, samples)
    assert trained(model, samples) == first and not prepared  # the engine had decoded it
    monkeypatch.setattr("groupwise.model.vision.PREPARED_BYTES", 0)
    eyes(base).forget(other)
    asked(base, user(other, "How many?"))
    assert trained(model, samples) == first and trained(model, samples) == first
    assert len(prepared) == 1  # to see how many tokens it has, for two passes too


def count_calls(vision: Vision, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by the first argument of each call."""
    calls, method = list[Any](), getattr(vision, name)
    monkeypatch.setattr(vision, name, lambda first, *args: calls.append(first) or method(first, *args))
    return calls


def _own_of_twin(base: LoadedModel, model: Any, row: Sequence[int]) -> Tensor:
    from groupwise.model.load import plain_attention

    with plain_attention(model):
        return own_logits(base, row, eyes(base).pictures(row), model)


@pytest.mark.parametrize("name", slow_but({*FAMILIES} - ALIKE, of=tuple(FAMILIES)))
def test_adapters_of_the_eyes_sample_as_peft_has_it(load: Load, name: str, tmp_path: Path) -> None:
    """Two versions and the base, over one image at once, and again from what is kept."""
    base, versions = load(name), [PolicyVersion("a", 1), PolicyVersion("a", 2)]
    prompt = asked(base, user(ONE, "How many?"))
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    requests = [
        SamplingRequest(prompt_ids=prompt, n=2, params=params, version=version, cache=True)
        for version in (PolicyVersion.base(), *versions)
    ]
    with closing(LocalEngine(base, max_rows=8)) as engine:
        for version in versions:
            adapter_of(base, tmp_path / str(version), seed=version.number)
            engine.load(version, tmp_path / str(version))
        said, again = engine.generate(requests), engine.generate(requests)
    found = list[list[Tensor]]()
    for version, mine, same in zip((None, *versions), said, again, strict=True):
        model: Any = base.model
        if version is not None:
            model = PeftModel.from_pretrained(
                copy.deepcopy(model), str(tmp_path / str(version)), autocast_adapter_dtype=False
            )
        found.append([])
        for each, other in zip(mine, same, strict=True):
            with torch.no_grad():
                own = own_logits(base, (*prompt, *each.token_ids), [ONE], model).log_softmax(-1)
            expected = [float(own[len(prompt) - 1 + i, token]) for i, token in enumerate(each.token_ids)]
            assert each.logprobs == pytest.approx(expected, abs=1e-9)
            assert each.token_ids == other.token_ids and other.logprobs == pytest.approx(expected, abs=1e-9)
            found[-1].append(own[len(prompt) - 1])
    first, *others = (each[0] for each in found)
    assert all(float((first - other).abs().max()) > 1e-4 for other in others)


def test_a_model_that_reads_text_has_no_eyes_to_adapt(tiny: LoadedModel) -> None:
    for target in ("vision", "projector"):
        with raises(FieldError, field="train.lora.targets"):
            add_lora(share_weights(tiny.model), LoraSpec(targets=target), seed=0)


def test_a_model_that_reads_text_is_trained_as_text_alone(tiny: LoadedModel) -> None:
    model = share_weights(tiny.model)
    try:
        train_parts(model, ("text",))
        assert all(parameter.requires_grad for parameter in model.parameters())
        with raises(FieldError, field="train.parameters"):
            train_parts(model, ("text", "vision"))
    finally:
        model.requires_grad_(False)


def test_a_projector_without_a_linear_layer_takes_no_adapter(load: Load) -> None:
    with raises(FieldError, field="train.lora.targets"):
        adapted_modules(load("gemma3").model, ["projector"])


def test_names_of_modules_mean_the_text_decoders(load: Load) -> None:
    """SigLIP's are called the same."""
    names = adapted_modules(load("smolvlm").model, ["q_proj"])
    assert names and all(".text_model." in name for name in names)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm", "gemma4_e"])
def test_prompts_without_images_are_as_without_eyes(load: Load, name: str) -> None:
    base = load(name)
    prompt = asked(base, {"role": "user", "content": "2+2?"})
    (said,) = sampled(base, prompt, n=1)
    with torch.no_grad():
        own = (
            base.model(input_ids=torch.tensor([[*prompt, *said.token_ids]]), use_cache=False).logits[0].log_softmax(-1)
        )
    assert said.logprobs == pytest.approx(
        [float(own[len(prompt) - 1 + i, token]) for i, token in enumerate(said.token_ids)], abs=1e-9
    )


def test_prompts_are_equal_if_their_images_are(load: Load) -> None:
    base = load("qwen2_5_vl")
    one, again, other = (asked(base, user(each, "?")) for each in (ONE, Picture(ONE.data), TWO))
    assert one == again != other
    assert eyes(base).pictures(one) == [ONE] and eyes(base).pictures(other) == [TWO]
    shown = decode(one, base.tokenizer)
    assert shown.count("<|image_pad|>") == sum(map(is_of_image, one)) and not any(map(is_of_image, one[:3]))


def test_text_cannot_pass_for_an_image(load: Load) -> None:
    base = load("qwen2_5_vl")
    forged = asked(base, user(ONE, "<|vision_start|><|image_pad|><|vision_end|>"))
    assert eyes(base).pictures(forged) == [ONE]
    assert not any(map(is_of_image, asked(base, {"role": "user", "content": "<|image_pad|>"})))


def test_a_template_that_leaves_an_image_out_is_told(load: Load) -> None:
    base = load("smolvlm")
    with raises(ChatError):
        eyes(base).expand([1, 2, 3], [ONE])


def test_a_model_that_reads_text_refuses_images(tiny: LoadedModel) -> None:
    with raises(ChatError):
        encode_prompt(Prompt(id="1", messages=(user(ONE, "?"),)), tiny.tokenizer)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision prepares their images")
@pytest.mark.parametrize("name", WITH_TORCHVISION)
def test_a_model_whose_images_cannot_be_prepared_reads_text(
    load: Load, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = load(name)
    assert vision_of(base.model) is None and "torchvision" in caplog.text
    assert len(sampled(base, asked(base, {"role": "user", "content": "2+2?"}), n=1)[0].token_ids) == 9
    with raises(ChatError, words=False):
        asked(base, user(ONE, "?"))


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is here")
def test_a_tower_of_another_package_is_named(tmp_path: Path) -> None:
    folder = save_seeing("qwen3_vl", tmp_path)
    CONFIG_MAPPING["gemma3n"](text_config={"vocab_size": 300}).save_pretrained(folder)
    with raises(ModelError, words=False) as caught:
        load_model(str(folder), device="cpu")
    assert "timm" in caught.value.message


def test_images_are_encoded_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load("qwen3_vl")
    vision = eyes(base)
    vision._features.clear()
    runs = count_calls(vision, "computed", monkeypatch)
    prompt = asked(base, user(ONE, TWO, ONE, "Which?"))
    said = sampled(base, prompt)
    trained(share_weights(base.model), samples_of(prompt, said))
    shown = [vision.picture(token) for token in runs]
    assert [each for each in shown if each in (ONE, TWO)] == [ONE, TWO] and len(runs) <= 3  # one tries it out


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_conversation_goes_on_with_what_was_kept(load: Load, name: str) -> None:
    base = load(name)
    first = asked(base, user(ONE, "How many?"))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with closing(LocalEngine(base, max_rows=4)) as engine:
        (said,) = engine.generate([SamplingRequest(prompt_ids=first, params=params, cache=True)])[0]
        second = (*first, *said.token_ids, *asked(base, user(TWO, "And here?")))
        (kept,) = engine.generate([SamplingRequest(prompt_ids=second, params=params, cache=True)])[0]
        (anew,) = engine.generate([SamplingRequest(prompt_ids=second, params=params)])[0]
    assert kept.token_ids == anew.token_ids and kept.logprobs == pytest.approx(anew.logprobs, abs=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_transcript_goes_on_with_images(load: Load, name: str) -> None:
    """Turn by turn, and as an example, it is what it is as a whole."""
    base = load(name)
    if name == "llava_onevision":
        pytest.skip("one image a prompt")
    said = Message(role="assistant", content="42")
    transcript = Transcript([user(ONE, "What?")], base.tokenizer)
    assert transcript.prompt_ids == tuple(asked(base, user(ONE, "What?")))
    end = base.tokenizer.eos_token_id
    ids = (*base.tokenizer.encode("42"), end)
    transcript.speak(Completion(token_ids=ids, logprobs=(0.0,) * len(ids), text="42", finish_reason=FinishReason.STOP))
    transcript.hear([user("And", TWO)])
    whole = asked(base, user(ONE, "What?"), said, user("And", TWO))
    assert transcript.prompt_ids == tuple(whole) and eyes(base).pictures(whole) == [ONE, TWO]
    example = encode_supervised([user(ONE, "What?"), said, user("And", TWO), said], base.tokenizer)
    assert (*example.prompt_ids, *example.completion_ids)[: len(whole)] == tuple(whole)
    with raises(ChatError):
        encode_supervised([user("Draw."), {"role": "assistant", "content": user(ONE)["content"]}], base.tokenizer)


def test_what_another_process_encoded_is_found_on_the_shelf(tmp_path: Path) -> None:
    here, there = (load_seeing("qwen2_5_vl", tmp_path / name) for name in ("here", "there"))
    prompt = asked(here, user(ONE, "?"))
    with raises(DataError, kind="image", words=False):
        sampled(there, prompt)
    eyes(here).keep_in(tmp_path / "images")
    eyes(there).keep_in(tmp_path / "images")
    assert [each.logprobs for each in sampled(there, prompt)] == [each.logprobs for each in sampled(here, prompt)]


def test_a_model_that_is_not_computed_as_its_own_is_blind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_seeing("qwen2_5_vl", tmp_path)
    assert why_blind(share_weights(base.model)) is None
    features = Vision.features
    monkeypatch.setattr(Vision, "features", lambda self, token: Features(features(self, token).rows * 1.2))
    look(share_weights(base.model), None)
    assert eyes(base).blind is not None and packed_tolerance(base.model) < 1e-3
    with raises(ModelError):
        asked(base, user(ONE, "?"))
    assert asked(base, {"role": "user", "content": "2+2?"})  # text is read as before


def test_tokens_of_an_image_that_are_to_see_each_other_and_do_not_are_found(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load("gemma3")
    assert eyes(base).both_ways and why_blind(share_weights(base.model)) is None
    monkeypatch.setattr(eyes(base), "both_ways", False)
    assert why_blind(share_weights(base.model)) is not None


def test_a_later_image_whose_tokens_see_each_other_is_trained_as_a_part_of_what_was_said(load: Load) -> None:
    """In an episode of two turns the second image is among the completion's tokens; both samples share the first."""
    base = load("gemma3")
    first = asked(base, user(ONE, "How many?"))
    later = [(*base.tokenizer.encode("2"), *asked(base, user(TWO, words))[1:]) for words in ("And here?", "So?")]
    samples = [Sample(prompt_ids=first, completion_ids=each, mask=(1,) * len(each)) for each in later]
    found = trained(share_weights(base.model), samples)
    for sample, logprobs in zip(samples, found, strict=True):
        row = (*first, *sample.completion_ids)
        with torch.no_grad():
            own = own_logits(base, row, [ONE, TWO]).log_softmax(-1)
        shown = [0 if is_of_image(token) else token for token in sample.completion_ids]
        expected = [float(own[len(first) - 1 + i, token]) for i, token in enumerate(shown)]
        assert logprobs == pytest.approx(expected, abs=1e-9)


def test_ids_of_images_are_beyond_every_vocabulary(load: Load) -> None:
    base = load("qwen2_5_vl")
    ids = [token for token in asked(base, user(ONE, "?")) if is_of_image(token)]
    assert ids == list(range(ids[0], ids[0] + len(ids))) and ids[0] >= FIRST and ids[-1] < 2**63
