"""A version as a whole model: transformers and llama.cpp's format have its weights, words and chat template."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_project import cli, save_model
from groupwise.config.lora import LoraSpec
from groupwise.engine.local import LocalEngine
from groupwise.errors import AdapterError, ModelError
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import load_model
from groupwise.pictures import read_picture
from groupwise.store.adapters import AdapterStore
from groupwise.store.export import export_model
from groupwise.store.files import Provenance
from groupwise.store.gguf import check_gguf, write_gguf
from groupwise.store.locate import TrainedPolicy, find_policy
from groupwise.train.learner import Learner
from groupwise.train.lora import lora_tensors
from groupwise.types import PolicyVersion, Prompt, SamplingParams, SamplingRequest
from seeing_models import drawn, save_seeing
from slow_cases import slow_but
from wording import raises, wording

FAMILIES = ("qwen3", "qwen2", "llama", "gemma3", "gpt2", "qwen3_moe")
IN_GGUF = ("qwen3", "qwen2", "llama")


@pytest.fixture(scope="module")
def trained(make_base, tmp_path_factory: pytest.TempPathFactory):
    """`trained("llama")`: the policy of a store whose adapter changes every logit, and its learner."""
    made: dict[tuple, tuple[TrainedPolicy, Learner]] = {}

    def make(family: str, *, quantization=None, options=(), **spec) -> tuple[TrainedPolicy, Learner]:
        key = (family, quantization, options, *spec.items())
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            model = str(
                save_model(make_base(family, dtype=torch.float32, context=128, **dict(options)), folder / "model")
            )
            base = load_model(model, device="cpu", quantization=quantization)
            learner = Learner(base, lora=LoraSpec(**{"rank": 4, "alpha": 8.0, **spec}))
            g = torch.Generator().manual_seed(1)
            for tensor in lora_tensors(learner.model).values():
                tensor.data.copy_(0.2 * torch.randn(tensor.shape, generator=g))
            store = AdapterStore(folder / "adapters")
            info = Provenance(base_model=model, base_hash=base.hash, quantization=base.quantization)
            version = store.publish("math", learner.save_adapter, info=info)
            made[key] = find_policy(str(store.path(version))), learner
        return made[key]

    return make


def logprobs(model, sample) -> list[float]:
    """Of the completion's tokens by a model's own forward."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.completion_ids)])
    with torch.no_grad():
        logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
    start = len(sample.prompt_ids)
    return [float(logp[t - 1, ids[0, t]]) for t in range(start, ids.shape[1])]


@pytest.fixture
def sample(make_samples):
    return make_samples(((5, (9,)),), holes=False)[0]


# -- merged ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_was_trained(trained, sample, family: str, tmp_path: Path) -> None:
    policy, learner = trained(family, **({"targets": ("experts", "all-linear")} if family == "qwen3_moe" else {}))
    exported = export_model(policy, tmp_path / "whole", format="merged", dtype="float32")
    assert exported.note is None and exported.dtype == "float32"
    whole = AutoModelForCausalLM.from_pretrained(exported.path)
    assert logprobs(whole, sample) == pytest.approx(learner.forward([sample])[0], abs=1e-4)
    assert logprobs(whole, sample) != pytest.approx(learner.forward([sample], reference=True)[0], abs=1e-2)
    again = load_model(str(exported.path))
    assert again.eos_ids == learner.base.eos_ids == tuple(whole.generation_config.eos_token_id)
    assert again.tokenizer.chat_template == learner.base.tokenizer.chat_template is not None
    assert again.tokenizer.get_vocab() == learner.base.tokenizer.get_vocab()
    saved = json.loads((exported.path / "config.json").read_text())
    assert saved["use_cache"] is True and saved["dtype"] == "float32" and "quantization_config" not in saved


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_its_type(trained, sample, dtype: str, tmp_path: Path) -> None:
    policy, learner = trained("qwen3")
    exported = export_model(policy, tmp_path / "whole", format="merged", dtype=dtype)
    whole = AutoModelForCausalLM.from_pretrained(exported.path, dtype="auto")
    assert exported.dtype == ("float32" if dtype == "auto" else dtype) == str(whole.dtype).removeprefix("torch.")
    assert logprobs(whole, sample) == pytest.approx(learner.forward([sample])[0], abs=0.5)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_base_is_merged_into_as_it_was_trained(trained, sample, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    policy, learner = trained("qwen3", quantization=kind)
    exported = export_model(policy, tmp_path / "whole", format="merged", dtype="float32")
    assert f"trained over in {kind}" in exported.note
    whole = AutoModelForCausalLM.from_pretrained(exported.path)
    assert logprobs(whole, sample) == pytest.approx(learner.forward([sample])[0], abs=1e-4)


def test_an_empty_directory_is_filled_and_stays_the_one_that_it_was(trained, tmp_path: Path) -> None:
    """A mounted volume cannot be replaced, nor a link by what it points to; and somebody may stand in it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    before = (tmp_path / "out").stat().st_ino
    policy, _ = trained("llama")
    export_model(policy, tmp_path / "link", format="merged")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out").stat().st_ino == before
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith(".") for name in names)


def test_another_base_is_refused_and_nothing_is_left(trained, make_base, tmp_path: Path) -> None:
    policy, _ = trained("qwen3")
    other = save_model(make_base("qwen3", dtype=torch.float32, context=128, seed=5), tmp_path / "other")
    with raises(AdapterError):
        export_model(
            TrainedPolicy(model=str(other), adapter=policy.adapter, run_dir=None), tmp_path / "x", format="merged"
        )
    (tmp_path / "there").write_text("mine")
    for place, form in ((other, "merged"), (tmp_path / "there", "gguf")):
        with raises(AdapterError):
            export_model(policy, place, format=form)
    with raises(ModelError):
        export_model(policy, tmp_path / "x", format="merged", dtype="q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]


def test_an_adapter_trained_in_bfloat16_over_float32_files(make_base, tmp_path: Path, sample) -> None:
    model = str(save_model(make_base("qwen3", dtype=torch.float32, context=128), tmp_path / "model"))
    base = load_model(model, device="cpu", dtype="bfloat16")
    store = AdapterStore(tmp_path / "adapters")
    learner = Learner(base, lora=LoraSpec(rank=4))
    version = store.publish("math", learner.save_adapter, info=Provenance(base_model=model, base_hash=base.hash))
    policy = find_policy(str(store.path(version)))
    assert export_model(policy, tmp_path / "whole", format="merged", dtype="float32").path.is_dir()


# -- GGUF --------------------------------------------------------------------------------------------------------------


def read_back(path: Path) -> tuple[dict, dict]:
    """Metadata, and tensors in float32 in transformers' orientation."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


@pytest.mark.parametrize("dtype", slow_but({"bfloat16", "q8_0"}, of=("float32", "float16", "bfloat16", "q8_0")))
@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf_has_the_merged_weights(trained, family: str, dtype: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    policy, learner = trained(family)
    whole = export_model(policy, tmp_path / "whole", format="merged", dtype="float32")
    path = export_model(policy, tmp_path / "whole.gguf", format="gguf", dtype=dtype).path
    fields, tensors = read_back(path)
    expected = dict(AutoModelForCausalLM.from_pretrained(whole.path, dtype="float32").named_parameters())
    assert len(tensors) == len(expected)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 2)
    close = {"float32": 0.0, "float16": 1e-3, "bfloat16": 4e-3, "q8_0": 0.02}[dtype]
    for name, weight in expected.items():
        mine, wanted = tensors[names.get_name(name, (".weight", ".bias"))], weight.detach().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = (
                learner.base.model.config.num_attention_heads
                if "q_" in name
                else learner.base.model.config.num_key_value_heads
            )
            pairs = mine.reshape(heads, mine.shape[0] // heads // 2, 2, *mine.shape[1:])
            mine = np.stack([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(mine.shape)
        assert mine.shape == wanted.shape, name
        assert np.abs(mine - wanted).max() <= (close if wanted.ndim > 1 else 0.0) * np.abs(wanted).max(), name
    config, arch = learner.base.model.config, family
    assert fields["general.architecture"] == arch and fields[f"{arch}.block_count"] == 2
    assert fields[f"{arch}.attention.head_count_kv"] == config.num_key_value_heads
    assert fields[f"{arch}.rope.freq_base"] == config.rope_parameters["rope_theta"]
    tokens, tokenizer = fields["tokenizer.ggml.tokens"], learner.base.tokenizer
    assert len(tokens) == learner.base.vocabulary == fields[f"{arch}.vocab_size"]
    assert all(tokens[number] == text for text, number in tokenizer.get_vocab().items())
    assert fields["tokenizer.ggml.pre"] == "qwen2" and fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert len(fields["tokenizer.ggml.merges"]) > 10 and fields["tokenizer.ggml.eos_token_id"] in learner.base.eos_ids


@pytest.mark.parametrize("family", IN_GGUF)
@pytest.mark.filterwarnings("ignore")  # transformers' own, of GGUF
def test_transformers_reads_the_gguf(trained, sample, family: str, tmp_path: Path) -> None:
    """Another implementation of the format: it turns a Llama's rows back, for one. It takes every Qwen3 to have heads
    of 128, and no Llama to have biases."""
    pytest.importorskip("gguf")
    own = {
        "qwen3": (("head_dim", 128), ("tie_word_embeddings", True)),
        "llama": (("head_dim", 8), ("attention_bias", False)),
    }
    policy, learner = trained(family, options=own.get(family, ()))
    export_model(policy, tmp_path / "whole.gguf", format="gguf", dtype="float32")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="whole.gguf", dtype=torch.float32)
    assert logprobs(whole, sample) == pytest.approx(learner.forward([sample])[0], abs=1e-3)
    text = "12 + 30 = 42, don't\n\n  you think?"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="whole.gguf")
    assert tokenizer(text, add_special_tokens=False).input_ids == learner.base.tokenizer(text).input_ids


@pytest.mark.parametrize("family", [None, *IN_GGUF])
def test_llama_cpp_computes_as_we_do(trained, family: str | None, tmp_path: Path) -> None:
    """A model as GGUF in llama.cpp itself, the starter or a trained one of a family: it splits a text into our tokens,
    and answers with our log-probabilities."""
    xllamacpp = pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    path = tmp_path / "whole.gguf"
    if family is None:
        base = load_model("starter", device="cpu", dtype="float32")
        write_gguf(base, path, dtype="float32")
    else:
        export_model(trained(family)[0], tmp_path / "whole", format="merged", dtype="float32")
        export_model(trained(family)[0], path, format="gguf", dtype="float32")
        base = load_model(str(tmp_path / "whole"), device="cpu", dtype="float32")
    chat = [{"role": "user", "content": "What is 12 + 30? Reply with just the number."}]
    text = str(base.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    ids = tuple(base.tokenizer(text).input_ids)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    with closing(LocalEngine(base, max_rows=1)) as engine:
        request = SamplingRequest(prompt_ids=ids, n=1, params=params, version=PolicyVersion.base())
        ((mine,),) = engine.generate([request])
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.cpuparams.n_threads, options.warmup = str(path), 128, 1, False
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(options)
    answer = server.handle_completions({"prompt": text, "max_tokens": 4, "temperature": 0, "n_probs": 1})
    told = answer["choices"][0]["logprobs"]["content"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert told and tuple(token["id"] for token in told) == mine.token_ids[: len(told)]  # up to half a character
    assert [token["logprob"] for token in told] == pytest.approx(mine.logprobs[: len(told)], abs=1e-4)


def test_what_has_no_place_in_gguf_says_so(trained, monkeypatch, tmp_path: Path) -> None:
    policy, _ = trained("gemma3")
    if __import__("importlib.util").util.find_spec("gguf") is not None:
        with raises(ModelError):
            export_model(policy, tmp_path / "x.gguf", format="gguf")
    monkeypatch.setattr("groupwise.store.gguf.importlib.util.find_spec", lambda name: None)
    with raises(ModelError) as caught:
        check_gguf("Qwen3ForCausalLM", "q8_0")
    assert caught.value.hint == "pip install 'groupwise[gguf]'" and not list(tmp_path.iterdir())


def test_a_tokenizer_that_splits_text_in_another_way_is_refused(trained, monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    policy, _ = trained("qwen3")
    monkeypatch.setattr("groupwise.store.gguf._PRE_TOKENIZERS", {"x": "qwen2"})
    with raises(ModelError):
        export_model(policy, tmp_path / "x.gguf", format="gguf", dtype="float32")
    assert not list(tmp_path.iterdir())


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(trained, sample, tmp_path: Path) -> None:
    policy, learner = trained("qwen3")
    store = str(policy.adapter.directory.parents[1])
    done = cli("adapters", "export", "math", tmp_path / "whole", "--format", "merged", "--store", store, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {
        "version": "math@1", "path": str(tmp_path / "whole"), "format": "merged", "dtype": "float32",
        "base_model": policy.model, "note": None,
    }  # fmt: skip
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert logprobs(whole, sample) == pytest.approx(learner.forward([sample])[0], abs=1e-4)
    refused = cli("adapters", "export", "math", tmp_path / "x", "--dtype", "float16", "--store", store)
    assert refused.exit_code == 2
    wording(refused.stderr)


@pytest.mark.parametrize("family", ["smolvlm", "gemma4_e", "qwen3_5"])
def test_a_model_that_sees_is_written_with_how_images_are_prepared(tmp_path: Path, family: str) -> None:
    saved = save_seeing(family, tmp_path / "base")
    policy = TrainedPolicy(model=str(saved), adapter=None, run_dir=None)
    whole = export_model(policy, tmp_path / "whole", format="merged", dtype="float32").path
    said = {"role": "user", "content": [{"type": "image", "image": read_picture(drawn(90, 60))}]}
    prompts, logits = [], []
    for place in (saved, whole):
        base = load_model(str(place), device="cpu", dtype="float32")
        vision = vision_of(base.model)
        assert vision is not None
        prompts.append(encode_prompt(Prompt(id="1", messages=(said,)), base.tokenizer).token_ids)  # type: ignore[arg-type]
        logits.append(vision.own_logits(prompts[-1], read_picture(drawn(90, 60))))
    assert prompts[0] == prompts[1] and torch.equal(*logits)
