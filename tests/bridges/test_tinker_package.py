"""The unmodified `tinker` package against a server: warm-up, custom loss, sampling, saved states, errors."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from wording import raises

pytest.importorskip("tinker", "0.38")

import tinker
import torch

from groupwise.bridges.tinker import schema as bodies
from groupwise.bridges.tinker.training import tokenizer_of
from groupwise.model.load import plain_attention
from groupwise.train.lora import adapter_off
from tinker_wire import listening, package_client
from whole_server import Whole

types: Any = tinker.types


@pytest.fixture(scope="module")
def site(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Whole, str]]:
    with listening(tmp_path_factory.mktemp("state"), model_dir) as found:
        yield found


@pytest.fixture
def service(site: tuple[Whole, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with package_client(site[1], monkeypatch) as client:
        yield client


@pytest.fixture
def model(site: tuple[Whole, str]) -> str:
    return site[0].server.config.model


def datum(tokens: list[int], **values: Any) -> Any:
    inputs = {"target_tokens": tokens[1:], **values}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_defaults_are_the_packages() -> None:
    """What a client leaves out has the value that the package would have sent."""
    pairs = [
        (bodies.Adam(), types.AdamParams()),
        (bodies.Params(), types.SamplingParams()),
        (bodies.Lora(rank=32), types.LoraConfig(rank=32)),
    ]
    for mine, given in pairs:
        assert given.model_dump(include=set(type(mine).model_fields)) == mine.model_dump()


def test_supervised_steps_lower_the_loss_and_a_chunked_batch_is_one_batch(service: Any, model: str) -> None:
    trainer = service.create_lora_training_client(base_model=model, rank=4, seed=1).result()
    assert trainer.get_info().lora_rank == 4
    assert trainer.get_tokenizer().encode("What is 2+2?")
    data = [datum([5, 6, 7, 8 + i], weights=[0.0, 1.0, 1.0]) for i in range(3)] * 500  # two chunks, sent in any order
    losses = []
    for _ in range(4):
        backward = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=2e-2))
        losses.append(backward.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    assert len(backward.result().loss_fn_outputs) == 1500
    assert losses[-1] < 0.7 * losses[0], losses


def test_a_custom_loss_is_the_built_in_one(service: Any, model: str) -> None:
    import torch

    tokens = [5, 6, 7, 8, 9]
    advantages = np.array([0.0, 1.0, -0.5, 0.3], "f4")
    ends = []
    for custom in (False, True):
        trainer = service.create_lora_training_client(base_model=model, rank=4, seed=2).result()
        plain = trainer.forward([datum(tokens, weights=[1.0] * 4)], "cross_entropy").result()
        q = np.array(plain.loss_fn_outputs[0]["logprobs"].data, "f4") + np.array([0, 0.1, -0.1, 0.05], "f4")

        def loss(data: Any, logprobs: Any, q: Any = q) -> Any:
            (row,) = logprobs
            return -((row - torch.tensor(q)).exp() * torch.tensor(advantages)).sum(), {"custom/x:sum": 1.0}

        if custom:
            backward = trainer.forward_backward_custom([datum(tokens)], loss)
        else:
            data = [datum(tokens, logprobs=q.tolist(), advantages=advantages.tolist())]
            backward = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        ends.append((backward.result().metrics["loss:sum"], stepped.result().metrics["grad_norm:mean"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


def test_targets_of_a_teacher_one_a_position_and_several(service: Any, model: str) -> None:
    """A student learns what a teacher, here a table, says after each token; a custom loss sees [N, K] as well."""
    import torch

    trainer = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
    tokens, said = [5, 6, 7, 8], torch.tensor([[11, 12, 0], [13, 14, 0], [15, 16, 0], [17, 18, 0]])
    weights = torch.tensor([0.7, 0.3, 0.0]).expand(4, 3)  # the third is padding
    named = {"target_tokens": said, "weights": weights}
    inputs = {name: types.TensorData.from_torch(values) for name, values in named.items()}
    data = [types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)]
    losses = []
    for _ in range(20):
        backward = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(backward.result().metrics["loss:sum"])
    assert losses[-1] < 0.25 * losses[0], losses
    p = trainer.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert p.shape == (4, 3) and (p[:, 0] > p[:, 2]).all()
    one = types.Datum(
        model_input=data[0].model_input, loss_fn_inputs={"target_tokens": said[:, 1].tolist(), "weights": [1.0] * 4}
    )
    alone = trainer.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    assert torch.allclose(alone, p[:, 1], atol=1e-5)

    def loss(data: Any, logprobs: Any) -> Any:
        assert logprobs[0].shape == (4, 3)
        return -(weights * logprobs[0]).sum(), {}

    assert types.TensorData.from_torch_sparse(said * (said == 12)).sparse_crow_indices is not None
    first = {"target_tokens": said, "weights": weights * (said == 12)}  # the package makes sparse ones of it
    (part,) = [types.Datum(model_input=data[0].model_input, loss_fn_inputs=first)]
    assert trainer.forward([part], "cross_entropy").result().metrics["loss:sum"] == pytest.approx(-0.3 * float(p[0, 1]))
    custom = trainer.forward_backward_custom(data, loss)
    stepped = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    built_in = trainer.forward_backward(data, "cross_entropy")
    again = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert custom.result().metrics["loss:sum"] == pytest.approx(built_in.result().metrics["loss:sum"], rel=1e-5)
    assert stepped.metrics["grad_norm:mean"] == pytest.approx(again.metrics["grad_norm:mean"], rel=1e-3)


def test_tokenizers_are_found_without_the_hub(
    service: Any, model: str, site: tuple[Whole, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By every client, wherever it runs on this machine; also where the server was told a relative path."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = [each.model_name for each in service.get_server_capabilities().supported_models]
    assert names[-1] == str(Path(model).absolute()) and site[0].server.config.served_name in names
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    snapshot = trainer.save_weights_and_get_sampling_client().result()
    path = trainer.save_weights_for_sampler("named").result().path
    saved = service.create_sampling_client(model_path=path).result()
    base = service.create_sampling_client(base_model=names[-1]).result()
    monkeypatch.chdir(tmp_path)
    for client in (trainer, snapshot, saved, base):
        assert client.get_tokenizer().encode("What is 2+2?")


def test_a_relative_path_and_one_that_looks_like_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert tokenizer_of("mine") == tokenizer_of("./mine") == str(tmp_path / "mine")
    assert tokenizer_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert Path(tokenizer_of("starter"), "tokenizer.json").is_file()
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    assert tokenizer_of("/models/mine") == "//models/mine"  # three parts would lose their last
    assert tokenizer_of("/models/of/mine") == "/models/of/mine"


def plainly(learner: Any, tokens: list[int], *, adapter: bool) -> np.ndarray:
    """Log-probabilities [N - 1, V] of what follows each token but the last, by the model's own forward."""
    with plain_attention(learner.model), torch.no_grad(), nullcontext() if adapter else adapter_off(learner.model):
        return learner.model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).numpy()


@pytest.mark.parametrize("trained", [True, False])
def test_given_tokens_of_a_prompt_are_scored(
    site: tuple[Whole, str], service: Any, model: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and sparse, alone and beside the prompt's own, with an adapter and without, in pieces of 4 positions."""
    monkeypatch.setattr("groupwise.engine.local.SCORED_AT_ONCE", 4)
    tokens, rng = [5, 6, 7, 8, 9, 3, 2, 11, 17, 4], np.random.default_rng(0)
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    for _ in range(2):
        trainer.forward_backward([datum(tokens, weights=[1.0] * 9)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    learner = site[0].app.state.server.more["tinker"].models.find(trainer.model_id).trainer.learner
    expected, other = (plainly(learner, tokens, adapter=each) for each in (trained, not trained))
    assert np.abs(expected - other).max() > 0.1
    sampler = service.create_sampling_client(base_model=model).result()
    if trained:
        sampler = trainer.save_weights_and_get_sampling_client().result()
    wanted = rng.integers(0, 250, (9, 3))
    wanted[[0, 4, 4], [1, 0, 2]] = -1
    listed = np.full((9, 3), -1)
    listed[[2, 2, 8], [0, 2, 1]] = [13, 240, 77]

    def asked(ids: np.ndarray, *, sparse: bool = False, **options: Any) -> Any:
        given = types.TensorData.from_numpy(ids)
        if sparse:
            given = types.TensorData.from_torch_sparse(torch.tensor(ids), pad_value=-1)
        params = types.SamplingParams(max_tokens=1, seed=1)
        prompt = types.ModelInput.from_ints(tokens)
        found = sampler.sample(prompt, 1, params, target_prompt_logprobs=given, **options).result()
        scores = np.where(ids < 0, 0, np.take_along_axis(expected, ids.clip(0), 1))
        np.testing.assert_allclose(found.target_prompt_logprobs.to_numpy(), scores, atol=1e-5)
        assert found.target_prompt_logprobs.dtype == "float32" and found.target_prompt_logprobs.shape == [*ids.shape]
        return found

    asked(wanted)
    asked(np.empty((9, 0), int))
    found = asked(listed, sparse=True)
    assert found.target_prompt_logprobs.sparse_col_indices == [0, 2, 1]
    assert found.prompt_logprobs is None and found.topk_prompt_logprobs is None
    found = asked(wanted, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3)
    assert found.prompt_logprobs[:7] == [None] * 7 == found.topk_prompt_logprobs[:7]
    np.testing.assert_allclose(found.prompt_logprobs[7:], expected[[6, 7, 8], tokens[7:]], atol=1e-5)
    best = [[value for _, value in row] for row in found.topk_prompt_logprobs[7:]]
    np.testing.assert_allclose(best, -np.sort(-expected[6:])[:, :2], atol=1e-5)
    with raises(tinker.RequestFailedError):
        asked(wanted[:8])
    with raises(tinker.RequestFailedError):
        asked(np.where(wanted < 0, 9999, wanted))


def test_a_narrowed_completion_of_which_the_masks_are_gone_is_refused_where_spans_say_whose_it_is(
    site: tuple[Whole, str], service: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans as the cookbook makes them: trained while it is known, then refused; without spans, or where nothing of it
    weighs anything, trained as before."""
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = [5, 6, 7]

    def drawn(**narrow: Any) -> Any:
        params = types.SamplingParams(max_tokens=5, seed=1, stop=[], **narrow)
        return sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]

    def trained(sampled: Any, *, spans: bool = True, advantage: float = 1.0, loss: str = "importance_sampling") -> Any:
        values = {"logprobs": [0.0, 0.0, *sampled.logprobs], "advantages": [0.0, 0.0, *[advantage] * 5]}
        if loss == "cross_entropy":
            values = {"weights": [0.0, 0.0, *[1.0] * 5]}
        made = datum([*prompt, *sampled.tokens], **values)
        if spans:
            about, told = {"sequence_id": sampled.sequence_id}, tinker.SampledProvenanceSpan
            read = [tinker.PromptProvenanceSpan(**about, length=3), told(**about, length=4)]
            predicted = [tinker.PromptProvenanceSpan(**about, offset=1, length=2), told(**about, length=5)]
            made = made.with_provenance(model_input=read, loss_fn_inputs=predicted)
        return trainer.forward_backward([made], loss).result().metrics["loss:sum"]

    whole, greedy = drawn(), drawn(top_p=0.5, temperature=0.0)
    one, other = drawn(top_p=0.5), drawn(top_k=2)
    for each in (whole, one, other):
        assert trained(each) == pytest.approx(-5, abs=1e-4)  # the ratio is 1
    models = site[0].app.state.server.more["tinker"].models
    monkeypatch.setattr(models.masks, "_most", 0)
    drawn(top_p=0.5)  # and with it all others are forgotten
    gradient = [p.grad.clone() for p in models.find(trainer.model_id).trainer.learner.parameters]
    for each in (one, other):
        with raises(tinker.RequestFailedError):
            trained(each)
        with raises(tinker.RequestFailedError):
            trained(each, advantage=0.0, loss="dro")  # which holds them to the sampler's all the same
    assert all(
        torch.equal(p.grad, was)
        for p, was in zip(models.find(trainer.model_id).trainer.learner.parameters, gradient, strict=True)
    )
    assert trained(one, spans=False) != pytest.approx(-5, abs=1e-2)
    assert trained(one, advantage=0.0) == 0 and trained(one, loss="cross_entropy") > 0
    assert trained(whole) == pytest.approx(-5, abs=1e-4) and trained(greedy) < 0


def test_sampling_saving_and_going_on(service: Any, model: str) -> None:
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    data = [datum([5, 6, 7, 8, 9], weights=[1.0] * 4)]

    def step() -> None:
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=5e-2)).result()

    step()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, seed=3, temperature=1.0, stop=[])
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    before = sampler.sample(prompt, 3, params, **options).result()
    step()
    after = sampler.sample(prompt, 3, params, **options).result()
    assert [s.tokens for s in before.sequences] == [s.tokens for s in after.sequences]
    assert before.prompt_logprobs[0] is None and before.prompt_logprobs[1:] == after.prompt_logprobs[1:]
    assert len(before.topk_prompt_logprobs) == 3
    state = trainer.save_state("here").result().path
    path = trainer.save_weights_for_sampler("final").result().path
    again = service.create_training_client_from_state_with_optimizer(state).result()
    ours, theirs = [c.forward(data, "cross_entropy").result().metrics["loss:sum"] for c in (trainer, again)]
    assert ours == theirs
    final = service.create_sampling_client(model_path=path).result()
    base = service.create_sampling_client(base_model=model).result()

    async def scored() -> list[list[Any]]:
        return list(await asyncio.gather(*(client.compute_logprobs(prompt) for client in (final, base, sampler))))

    rows = asyncio.run(scored())
    assert len({tuple(row) for row in rows}) == 3  # one batch of three policies
    rest = service.create_rest_client()
    assert {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints} >= {state, path}
    rest.delete_checkpoint_from_tinker_path(state).result()
    with raises(tinker.NotFoundError):
        service.create_training_client_from_state(state).result()


def test_what_the_package_counts_and_is_refused_keeps_nothing_from_being_saved(service: Any, model: str) -> None:
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    trainer.forward_backward([datum([5, 6, 7, 8], weights=[1.0] * 3)], "cross_entropy").result()
    wrong = [
        lambda: trainer.optim_step(types.AdamParams(learning_rate=float("nan"))),
        lambda: trainer.save_state("x", ttl_seconds=0),
        lambda: trainer.save_state("x", ttl_seconds=10**10),
        lambda: trainer.save_weights_external("x", ttl_seconds=0),
        lambda: trainer.save_weights_external("x", age_encryption_recipients=["age1nonsense"]),
    ]
    for call in wrong:
        with raises(tinker.RequestFailedError):
            call().result()
    assert trainer.save_state("kept").result().path.endswith("/weights/kept")
    assert trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm:mean"] > 0


def command(*words: str) -> Any:
    """`tinker ...`, as the package's command line is."""
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    ran = CliRunner().invoke(main_cli, words)
    return ran if ran.exception is None or ran.exit_code == 0 else ran.exception


@pytest.mark.filterwarnings("ignore")
def test_weights_are_taken_away_in_pefts_layout_published_and_counted(
    service: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    data = [datum([5, 6, 7, 8, 9], weights=[1.0] * 4)]
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=5e-2)).result()
    trained = trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]
    state = trainer.save_state("here").result().path
    saved = trainer.save_weights_external("taken").result()
    assert saved.path == state.replace("/weights/here", "/external_weights/taken")
    with raises(tinker.RequestFailedError):
        trainer.save_weights_external("taken").result()

    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    for path in (saved.path, state):  # the second through a temporary export of another run
        ran = command("checkpoint", "download", path, "-o", str(tmp_path))
        assert ran.exit_code == 0, ran
        directory = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert sorted(each.name for each in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), directory)
        import torch

        logits = loaded(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
        assert -float(logits[range(4), [6, 7, 8, 9]].sum()) == pytest.approx(trained, rel=1e-4)

    rest = tinker.RestClient()
    run = saved.path.split("/")[2]
    kinds = {each.tinker_path: each.checkpoint_type for each in rest.list_checkpoints(run).result().checkpoints}
    assert kinds == {saved.path: "external", state: "training"}  # and the temporary one is gone
    for _ in range(2):  # the package would repeat a 409 for five minutes
        rest.publish_checkpoint_from_tinker_path(state).result()
    assert {c.tinker_path: c.public for c in rest.list_checkpoints(run).result().checkpoints}[state]
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    assert not any(each.public for each in rest.list_checkpoints(run).result().checkpoints)

    admin = tinker.AdminClient()
    (used,) = admin.get_current_checkpoint_storage_usage().result().data
    assert used.checkpoint_count >= 2 and used.size_bytes > 10_000
    with raises(tinker.NotFoundError):
        admin.get_audit_log().result()
    for wrong in (saved.path, state):
        with raises(tinker.BadRequestError):
            service.create_sampling_client(model_path=wrong).result()


@pytest.mark.filterwarnings("ignore")
def test_files_are_encrypted_for_who_is_to_read_them(service: Any, model: str, site: tuple[Whole, str]) -> None:
    pyrage = pytest.importorskip("pyrage")
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    key = pyrage.x25519.Identity.generate()
    path = trainer.save_weights_external("secret", age_encryption_recipients=[str(key.to_public())]).result().path
    urls = tinker.RestClient().get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    with urllib.request.urlopen(urls["adapter_config.json.age"], timeout=120) as given:
        assert json.loads(pyrage.decrypt(given.read(), [key]))["r"] == 4


def test_openais_client_samples_where_tinker_has_it_and_by_tinkers_names(
    service: Any, model: str, site: tuple[Whole, str]
) -> None:
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    trainer.forward_backward([datum([5, 6, 7, 8, 9], weights=[1.0] * 4)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.3)).result()
    path = trainer.save_weights_for_sampler("chats").result().path
    state = trainer.save_state("state").result().path
    said: dict[str, set[str]] = {}
    for place, key in (("/oai/api/v1", "tml-secret"), ("/v1", "secret")):
        client = openai.OpenAI(base_url=site[1] + place, api_key=key, max_retries=0)
        assert model.rpartition("/")[2] in [each.id for each in client.models.list()]
        for name in (path, f"{model};{path}", model, "base"):
            options: Any = {"model": name, "max_tokens": 8, "temperature": 0, "prompt": "What is"}
            chat: Any = {"model": name, "max_tokens": 8, "temperature": 0}
            completed = client.completions.create(**options).choices[0].text
            replied = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **chat)
            said.setdefault(name, set()).add(completed + "|" + str(replied.choices[0].message.content))
        for wrong, facts in (
            (state, ("invalid_value", "path")),
            (path + "x", ("checkpoint_not_found", None)),
            (f"no;{path}", ("invalid_value", "base_model")),
        ):
            with raises(openai.APIStatusError) as refused:
                client.completions.create(model=wrong, prompt="x", max_tokens=1)
            assert (refused.value.code, refused.value.param) == facts
        with raises(openai.BadRequestError):  # as long as a chat may be: no 413
            client.completions.create(model=model, prompt="a" * 400_000, max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=site[1] + "/v1", api_key="tml-secret", max_retries=0).models.list()
    assert all(len(texts) == 1 for texts in said.values())  # the same wherever it was asked
    assert said[path] == said[f"{model};{path}"] != said[model] == said["base"]


def test_what_is_not_supported_is_the_users_error_and_says_what_is(service: Any, model: str) -> None:
    trainer = service.create_lora_training_client(base_model=model, rank=4).result()
    with raises(tinker.RequestFailedError):
        trainer.forward_backward([datum([5, 6, 7])], "stable_reinforce").result()
    with raises(tinker.RequestFailedError):
        trainer.forward_backward([datum([5, 6], weights=[float("nan")])], "cross_entropy").result()
    with raises(tinker.BadRequestError):
        service.create_lora_training_client(base_model="other", rank=4).result()
