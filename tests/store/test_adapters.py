"""The adapter store on real files: what may be published, what a word resolves to, activation, and damage."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.numpy import load_file, save_file

from groupwise.errors import AdapterError, AdapterNotFoundError, GroupwiseError, InUseError, StorageError
from groupwise.store import files, unchanged
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import CONFIG, SIDECAR, WEIGHTS, Provenance, find_damage, locked
from groupwise.types import PolicyVersion
from wording import raises

BASE = PolicyVersion.base()
ORIGIN = Provenance(base_model="tiny", base_hash="aaaa", step=3, config_hash="c0", metrics={"reward/mean": 0.5})
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PEFT_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}


def save_adapter(directory: Path, *, value: float = 1.0, config: dict | None = None, tensors: dict | None = None):
    if tensors is None:
        shapes = {"A": (2, 8), "B": (8, 2)}
        tensors = {KEY.format(side): np.full(shape, value, np.float32) for side, shape in shapes.items()}
    (directory / CONFIG).write_text(json.dumps(PEFT_CONFIG | (config or {})))
    save_file(tensors, directory / WEIGHTS)


def save_bf16(directory: Path, bits: int):
    """safetensors.numpy cannot write bfloat16; the format is 8 bytes of header length, the header, the data."""
    save_adapter(directory)
    data = np.full(16, bits, np.uint16).tobytes()
    header = {
        KEY.format("A"): {"dtype": "BF16", "shape": [2, 8], "data_offsets": [0, 32]},
        KEY.format("B"): {"dtype": "BF16", "shape": [8, 2], "data_offsets": [32, 64]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data + data)


def publish(store: AdapterStore, name: str = "math", *, value: float = 1.0, info: Provenance = ORIGIN) -> PolicyVersion:
    return store.publish(name, lambda directory: save_adapter(directory, value=value), info=info)


@pytest.fixture
def store(tmp_path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


# --- notes ---


def test_a_store_reads_what_is_new_of_it(tmp_path, monkeypatch):
    """A list of versions that were listed before opens no sidecar; what another process did shows."""
    monkeypatch.setattr(unchanged, "SETTLED_S", -60.0)
    store, other = AdapterStore(tmp_path), AdapterStore(tmp_path)
    publish(store, "math")
    publish(store, "sql")
    reads, plain = [], files.read_info
    monkeypatch.setattr(files, "read_info", lambda *args, **kw: reads.append(kw["version"]) or plain(*args, **kw))
    assert store.list() == store.list() and sorted(map(str, reads)) == ["math@1", "sql@1"]
    reads.clear()
    made = publish(other, "math")
    other.delete(store.newest("sql"))
    other.refuse(made, "it is worse")
    assert [(str(info.version), info.unhealthy) for info in store.list()] == [
        ("math@1", None),
        (str(made), "it is worse"),
    ]
    assert [str(version) for version in reads if version == made]
    (store.path(made) / files.SIDECAR).write_text("{")
    assert [str(info.version) for info in store.list()] == ["math@1"] and store.warnings


def test_a_note_is_kept_beside_a_version_and_changes_none_of_its_bytes(store):
    first, second = publish(store), publish(store)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.path(first).iterdir()}
    assert (
        store.write_note(first, "  good at sums, weak at carries: 7×8 → ½ ") == "good at sums, weak at carries: 7×8 → ½"
    )
    other = AdapterStore(store.root)  # another process
    assert other.notes() == {first: "good at sums, weak at carries: 7×8 → ½"} and not other.warnings
    other.write_note(second, "worse")
    assert store.notes()[second] == "worse"  # what another process wrote is seen
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.path(first).iterdir()} == before
    assert store.write_note(second, " ") is None and store.write_note(first, None) is None
    assert other.notes() == {}


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "\x1b[31mred", "a\u2028b", "\ud800", "x" * 501])
def test_a_note_is_one_line_of_bounded_length(store, text):
    version = publish(store)
    store.write_note(version, "before")
    with raises(AdapterError):
        store.write_note(version, text)
    with pytest.raises(AdapterNotFoundError):
        store.write_note(PolicyVersion("math", 9), "of nothing")
    assert store.notes() == {version: "before"}


def test_a_note_goes_with_its_version(store):
    versions = [publish(store) for _ in range(5)]
    for version in versions:
        store.write_note(version, f"of {version}")
    store.delete(versions[0])
    store.prune("math", keep=3)
    store.rewind("math", 4)
    assert set(store.notes()) == set(versions[2:4])
    (store.path(versions[3]) / WEIGHTS).write_bytes(b"damaged")
    assert "is damaged" in AdapterStore(store.root).warnings[0]
    assert set(store.notes()) == {versions[2]}


def test_what_is_measured_of_a_version_is_kept_beside_it_and_goes_with_it(store):
    versions = [publish(store) for _ in range(3)]
    first, second = ({"suite": "lm-eval", "metrics": {"arc/acc": {"value": value}}} for value in (0.25, 0.5))
    before = {path: path.read_bytes() for path in store.path(versions[0]).iterdir()}
    store.record(versions[0], first)
    store.record(versions[0], second)
    store.record(versions[1], second)
    other = AdapterStore(store.root)
    assert other.evaluations(versions[0]) == (first, second) and other.evaluations(versions[2]) == ()
    assert {path: path.read_bytes() for path in store.path(versions[0]).iterdir()} == before and not other.warnings
    store.delete(versions[0])
    assert store.evaluations(versions[0]) == () and store.evaluations(versions[1]) == (second,)
    with pytest.raises(AdapterNotFoundError):
        store.record(versions[0], first)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"suite": '])
def test_results_that_cannot_be_read_are_said_and_not_written_over(store, text):
    version = publish(store)
    store.record(version, {"suite": "inspect"})
    [path] = (store.root / ".evaluations").iterdir()
    path.write_text(text)
    for attempt in (lambda: store.evaluations(version), lambda: store.record(version, {"suite": "inspect"})):
        with raises(AdapterError):
            attempt()
    assert path.read_text() == text
    assert store.path(version).is_dir()


@pytest.mark.parametrize("text", ["{", "[]", '{"no version": "x"}', "[" * 100_000])
def test_unreadable_notes_are_set_aside_and_nothing_else_is_lost(store, text):
    version = publish(store)
    (store.root / ".notes.json").write_text(text)
    with raises(AdapterError):
        store.notes()
    again = AdapterStore(store.root)
    assert "it is in quarantine, and versions have no notes" in again.warnings[0]
    assert again.notes() == {} and again.versions("math") == (version,)
    assert [path.read_text() for path in (store.root / ".quarantine").iterdir()] == [text]


# --- publishing ---


def test_publish_gives_numbers_and_keeps_what_was_written(store):
    first, second = publish(store, value=1.0), publish(store, value=2.0)
    assert [str(first), str(second)] == ["math@1", "math@2"]
    assert load_file(store.path(first) / WEIGHTS)[KEY.format("A")][0, 0] == 1.0
    assert load_file(store.path(second) / WEIGHTS)[KEY.format("A")][0, 0] == 2.0
    assert store.names() == ("math",) and store.versions("math") == (first, second)
    assert store.active == BASE  # publishing does not activate


def test_the_sidecar_remembers_where_a_version_came_from(store):
    first = publish(store)
    info = store.info(
        publish(store, info=Provenance(base_model="m", base_hash="h", parent=first, metrics={"kl": float("nan")}))
    )
    assert (info.base_model, info.base_hash, info.parent, info.version) == ("m", "h", first, PolicyVersion("math", 2))
    assert np.isnan(info.metrics["kl"])
    assert info.created.endswith("+00:00")
    assert set(info.files) == {CONFIG, WEIGHTS}
    assert json.loads((store.path(first) / SIDECAR).read_text())["metrics"] == {"reward/mean": 0.5}
    assert [entry.version for entry in store.list()] == [first, info.version]


def test_a_published_peft_adapter_loads_in_peft(store):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(config)
    state = {key: value.clone() for key, value in base.state_dict().items()}
    trained = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    ids = torch.arange(6)[None]
    expected = trained(input_ids=ids).logits

    version = store.publish("math", lambda directory: trained.save_pretrained(str(directory)), info=ORIGIN)

    again = Qwen3ForCausalLM(config)
    again.load_state_dict(state)
    loaded = PeftModel.from_pretrained(again, store.path(version))
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    with loaded.disable_adapter():
        assert not torch.allclose(loaded(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"r": 10**9},
        {"r": True},
        {"r": 4},
        {"lora_alpha": -1},
        {"lora_alpha": float("nan")},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"rank_pattern": [1]},
        {"auto_mapping": {"parent_library": "os"}},
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_its_key(store, change):
    with raises(AdapterError):
        store.publish("math", lambda directory: save_adapter(directory, config=change), info=ORIGIN)
    assert store.names() == ()


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"lm_head.weight": np.ones(2, np.float32)},
        {KEY.format("A"): np.ones((2, 8), np.float32)},
        {KEY.format("A"): np.ones((2, 8), np.float32), KEY.format("B"): np.ones((8, 3), np.float32)},
        {KEY.format("A"): np.ones((2, 8), np.int8), KEY.format("B"): np.ones((8, 2), np.int8)},
        {KEY.format("A")[17:]: np.ones((2, 8)), KEY.format("B")[17:]: np.ones((8, 2))},
    ],
)
def test_weights_that_are_not_a_lora_adapter_are_refused(store, tensors):
    with raises(AdapterError):
        store.publish("math", lambda directory: save_adapter(directory, tensors=tensors), info=ORIGIN)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(store, dtype, bad):
    tensors = {KEY.format("A"): np.ones((2, 8), dtype), KEY.format("B"): np.ones((8, 2), dtype)}
    store.publish("math", lambda directory: save_adapter(directory, tensors=tensors), info=ORIGIN)
    tensors[KEY.format("B")][7, 1] = bad
    with raises(AdapterError):
        store.publish("math", lambda directory: save_adapter(directory, tensors=tensors), info=ORIGIN)
    assert len(store.versions("math")) == 1


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])  # inf, -inf, NaN
def test_bfloat16_weights_are_read_too(store, bits):
    version = store.publish("math", lambda directory: save_bf16(directory, 0x7F7F), info=ORIGIN)  # the largest finite
    assert store.path(version).is_dir()
    with raises(AdapterError):
        store.publish("math", lambda directory: save_bf16(directory, bits), info=ORIGIN)


def write_nothing(directory: Path):
    del directory


def write_pickle(directory: Path):
    save_adapter(directory)
    (directory / "optimizer.pt").write_bytes(b"\x80\x04.")


def write_pickle_as_safetensors(directory: Path):
    save_adapter(directory)
    (directory / WEIGHTS).write_bytes(b"\x80\x04\x95" + b"0" * 100)


def write_link(directory: Path):
    save_adapter(directory)
    (directory / "README.md").symlink_to("/etc/hostname")


def write_folder(directory: Path):
    (directory / "default").mkdir()
    save_adapter(directory / "default")


def write_bad_json(directory: Path):
    save_adapter(directory)
    (directory / CONFIG).write_text("[" * 100_000)


def write_list(directory: Path):
    save_adapter(directory)
    (directory / CONFIG).write_text("[]")


def write_huge_config(directory: Path):
    save_adapter(directory)
    (directory / CONFIG).write_text(" " * (1 << 20) + "{}")


@pytest.mark.parametrize(
    "write",
    [
        write_nothing,
        write_pickle,
        write_pickle_as_safetensors,
        write_link,
        write_folder,
        write_bad_json,
        write_list,
        write_huge_config,
    ],
)
def test_a_directory_that_is_not_an_adapter_is_refused_and_leaves_nothing(store, write):
    with raises(AdapterError):
        store.publish("math", write, info=ORIGIN)
    assert store.list() == () and not list(store.root.glob(".staging-*"))


def test_an_error_of_the_writer_passes_through_and_leaves_nothing(store):
    def write(directory):
        save_adapter(directory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.publish("math", write, info=ORIGIN)
    assert store.list() == () and not list(store.root.glob(".staging-*"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
config_keys = ["peft_type", "r", "lora_alpha", "rank_pattern", "auto_mapping", "bias", "use_dora", "modules_to_save"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.dictionaries(st.sampled_from(config_keys), json_values, max_size=4))
def test_any_config_is_published_or_refused_but_never_crashes(store, config):
    try:
        store.publish("math", lambda directory: save_adapter(directory, config=config), info=ORIGIN)
    except AdapterError:
        return
    assert all(store.path(version).is_dir() for version in store.versions("math"))


@pytest.mark.parametrize("name", ["", "base", "..", ".hidden", "a/b", "../x", "a@1", "a b", "é", "x" * 65, "a\n", "-a"])
def test_names_that_could_leave_the_store_are_refused(store, name):
    with raises(AdapterError):
        publish(store, name)
    with pytest.raises(AdapterNotFoundError):
        store.path(PolicyVersion(name, 1)) if name != "base" else store.resolve("base@1")


# --- versions of jobs ---


def test_the_sidecar_remembers_the_job_and_its_canary(store):
    canary = {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.1 - 1e-17]}
    version = publish(store, info=replace(ORIGIN, job="j1", canary=canary))
    info = AdapterStore(store.root).info(version)
    assert (info.job, info.canary) == ("j1", canary)
    plain = store.info(publish(store))
    assert (plain.job, plain.canary) == (None, None)


def test_a_sidecar_of_before_there_were_jobs_is_read(store):
    version = publish(store)
    path = store.path(version) / SIDECAR
    old = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("job", "canary")}
    path.write_text(json.dumps(old))
    assert AdapterStore(store.root).info(version).job is None


def test_admit_is_asked_last_and_alone_and_may_name_another_version(store):
    first = publish(store)

    def admit() -> PolicyVersion:
        (staging,) = store.root.glob(".staging-*")
        assert {path.name for path in staging.iterdir()} == {CONFIG, WEIGHTS, SIDECAR}  # only the rename is missing
        with raises(StorageError), locked(store.root):
            pass
        return first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("groupwise.store.files.LOCK_TIMEOUT_S", 0.01)
        assert store.publish("math", save_adapter, info=ORIGIN, admit=admit) == first
    assert store.versions("math") == (first,) and not list(store.root.glob(".staging-*"))
    assert store.publish("math", save_adapter, info=ORIGIN, admit=lambda: None) == PolicyVersion("math", 2)


def test_what_admit_raises_passes_through_and_leaves_nothing(store):
    def admit():
        raise RuntimeError("the lease is lost")

    with raises(RuntimeError):
        store.publish("math", save_adapter, info=ORIGIN, admit=admit)
    assert store.versions("math") == () and not list(store.root.glob(".staging-*"))
    assert publish(store) == PolicyVersion("math", 1)  # the number was not used up


def test_the_version_of_a_job(store):
    versions = [publish(store, info=replace(ORIGIN, job=job)) for job in (None, "j1", "j2")]
    publish(store, "other", info=replace(ORIGIN, job="j3"))
    assert store.version_of_job("math", "j1") == versions[1]
    assert store.version_of_job("math", "j3") is None and store.version_of_job("nobody", "j1") is None
    (store.path(versions[2]) / SIDECAR).write_text("{")
    assert store.version_of_job("math", "j1") == versions[1] and store.version_of_job("math", "j2") is None


def test_a_job_that_looks_for_its_version_reads_each_of_the_others_once(store, monkeypatch):
    for job in ("j1", "j2", "j3"):
        publish(store, info=replace(ORIGIN, job=job))
    read, seen = files.read_info, list[str]()

    def counted(directory, *, version):
        seen.append(str(version))
        return read(directory, version=version)

    monkeypatch.setattr(files, "read_info", counted)
    for job in ("new", "newer"):
        assert store.version_of_job("math", job) is None
    assert seen == ["math@3", "math@2", "math@1"]
    store.delete(PolicyVersion("math", 2))
    fourth = publish(store, info=replace(ORIGIN, job="j4"))
    assert store.version_of_job("math", "j4") == fourth and store.version_of_job("math", "j2") is None
    assert seen[3:] == ["math@4"]


# --- resolving and activating ---


def test_a_name_does_not_mean_an_unhealthy_version(store):
    well, sick = publish(store), publish(store, info=replace(ORIGIN, unhealthy="it fell apart"))
    alone = publish(store, "alone", info=replace(ORIGIN, unhealthy="it fell apart"))
    assert (store.unhealthy(well), store.unhealthy(sick)) == (None, "it fell apart")
    assert store.newest("math") == store.resolve("math") == well and store.resolve("math@2") == sick
    assert store.newest("alone") is None and store.newest("nothing") is None
    with raises(AdapterNotFoundError):
        store.resolve("alone")
    store.activate(alone)  # by hand
    assert store.newest("alone") == store.resolve("alone") == alone
    store.activate(sick)
    assert store.newest("math") == store.resolve("math") == sick
    better = publish(store)
    assert store.newest("math") == better and store.resolve("math") == sick  # of that name, so the active one
    assert AdapterStore(store.root).unhealthy(sick) == "it fell apart"


def test_resolve(store):
    math1, math2, code1 = publish(store), publish(store), publish(store, "code")
    assert store.resolve(None) == BASE
    assert store.resolve("base") == BASE
    assert store.resolve("math") == math2  # nothing of that name is active: the newest
    assert store.resolve("math@1") == math1
    store.activate(math1)
    assert store.resolve(None) == math1
    assert store.resolve("math") == math1  # of that name, so the active one
    assert store.resolve("code") == code1
    assert store.resolve("base") == BASE


@pytest.mark.parametrize(
    "text", ["nope", "math@9", "math@x", "@1", "math@", "base@1", "../math", "math@²", "", "math@" + "9" * 5000]
)
def test_resolving_what_is_not_there_lists_what_there_is(store, text):
    publish(store), publish(store), publish(store, "code")
    with pytest.raises(AdapterNotFoundError) as caught:
        store.resolve(text)
    assert caught.value.hint == "there are (newest versions): base, code@1, math@2"
    assert len(str(caught.value)) < 300


def test_activation_and_rollback_survive_a_restart(store):
    math1, math2 = publish(store), publish(store)
    store.activate(math1)
    store.activate(math2)
    store.activate(math2)  # again: not a second entry
    again = AdapterStore(store.root)
    assert again.active == math2 and again.warnings == []
    assert again.rollback() == math1
    assert AdapterStore(store.root).active == math1
    assert again.rollback() == BASE
    with raises(AdapterError):
        again.rollback()


def test_how_many_versions_went_live_since(store):
    first, second, other = publish(store), publish(store), publish(store, "other")
    trial = publish(store, info=replace(ORIGIN, parent=second))
    of_trial = publish(store, info=replace(ORIGIN, parent=trial))
    for version in (first, second, other):
        store.activate(version)
    base = PolicyVersion.base()
    assert [store.live_since(version) for version in (base, first, second, other)] == [3, 2, 1, 0]
    assert (store.live_since(trial), store.live_since(of_trial)) == (1, 1), "never live: as what they come from"
    assert store.live_since(PolicyVersion("unheard", 1)) == 0
    store.activate(first)
    assert (store.live_since(first), store.live_since(base)) == (0, 4)
    store.delete(second)
    assert store.live_since(PolicyVersion("math", 0)) == 2, "gone: the activations of newer ones of its name"


def test_base_can_be_activated_and_rolled_back_from(store):
    version = publish(store)
    store.activate(version)
    store.activate(BASE)
    assert store.resolve(None) == BASE
    assert store.rollback() == version


def test_only_what_exists_can_be_activated(store):
    with pytest.raises(AdapterNotFoundError):
        store.activate(PolicyVersion("math", 1))
    assert store.active == BASE


def test_a_version_of_another_base_model_is_refused_with_both_hashes(store):
    version = publish(store)
    store.check_base(version, "aaaa")
    store.check_base(BASE, "bbbb")
    with raises(AdapterError):
        store.check_base(version, "bbbb")


# --- removing ---


def test_a_number_is_never_given_out_twice(store):
    publish(store), store.delete(publish(store))
    assert publish(store) == PolicyVersion("math", 3)
    store.delete(PolicyVersion("math", 3))
    assert publish(AdapterStore(store.root)) == PolicyVersion("math", 4)


def test_the_active_version_cannot_be_deleted(store):
    version = publish(store)
    store.activate(version)
    with raises(AdapterError):
        store.delete(version)
    store.activate(BASE)
    store.delete(version)
    with pytest.raises(AdapterNotFoundError):
        store.path(version)
    assert store.rollback() == BASE  # the deleted version is no longer between the two
    with raises(AdapterError):
        store.rollback()


def test_what_somebody_holds_is_neither_pruned_nor_deleted(store):
    versions = [publish(store) for _ in range(4)]
    other = AdapterStore(store.root)
    with store.held(versions[0]) as directory, other.held(versions[0]) as same:
        assert directory == same
        assert other.prune("math", keep=2) == (versions[1],)
        with raises(InUseError):
            other.delete(versions[0])
        assert find_damage(directory, version=versions[0], hashes=True) is None
    assert other.prune("math", keep=2) == (versions[0],)
    with pytest.raises(AdapterNotFoundError), store.held(versions[0]):
        pass
    with store.held(versions[3]):
        other.rewind("math", 3)  # a run that publishes it again asks nobody
    assert store.versions("math") == (versions[2],)


def test_prune_keeps_the_newest_the_active_the_rollback_target_and_the_protected(store):
    versions = [publish(store) for _ in range(8)]
    store.activate(versions[1])
    store.activate(versions[2])
    removed = store.prune("math", keep=2, protect=[versions[4]])
    assert removed == (versions[0], versions[3], versions[5])
    assert store.versions("math") == tuple(versions[index] for index in (1, 2, 4, 6, 7))
    assert store.rollback() == versions[1]
    with raises(AdapterError):
        store.prune("math", keep=0)


def test_of_a_version_that_is_gone_nothing_that_was_read_is_kept(store):
    """A server that trains each minute removes half a million in a year."""
    versions = [publish(store) for _ in range(3)]
    for version in versions:
        os.utime(store.path(version) / SIDECAR, (1, 1))  # settled
        assert store.info(version).version == version and store.unhealthy(version) is None
    known = store._infos._known, store._health, store._verified
    assert [len(each) for each in known] == [3, 3, 3]
    store.prune("math", keep=2)
    store.delete(versions[1])
    assert [len(each) for each in known] == [1, 1, 1]
    store.delete(versions[2])
    assert not (store.root / "math").exists() and store.names() == ()
    assert publish(store).number == 4


# --- import and export ---


def test_export_is_a_plain_peft_directory_that_can_be_imported_again(store, tmp_path):
    version = publish(store, value=7.0)
    dest = store.export(version, tmp_path / "out" / "math")
    assert sorted(entry.name for entry in dest.iterdir()) == [CONFIG, WEIGHTS]
    again = store.import_(dest, "copy", info=ORIGIN)
    assert (store.path(again) / WEIGHTS).read_bytes() == (store.path(version) / WEIGHTS).read_bytes()
    with raises(AdapterError):
        store.export(version, dest)
    with raises(AdapterError):
        store.export(version, dest / CONFIG)


def test_import_reads_only_the_two_files(store, tmp_path):
    save_adapter(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "evil.py").write_text("raise SystemExit")
    version = store.import_(tmp_path, "math", info=ORIGIN)
    assert sorted(os.listdir(store.path(version))) == [CONFIG, WEIGHTS, SIDECAR]


def test_import_follows_links_as_the_hugging_face_cache_has_them(store, tmp_path):
    (blobs := tmp_path / "blobs").mkdir()
    (snapshot := tmp_path / "snapshot").mkdir()
    save_adapter(blobs)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(blobs / name)
    version = store.import_(snapshot, "math", info=ORIGIN)
    assert not (store.path(version) / WEIGHTS).is_symlink()


def test_import_refuses_pickles_pipes_and_what_is_too_big(store, tmp_path):
    with raises(AdapterError):
        store.import_(tmp_path / "none", "math", info=ORIGIN)
    save_adapter(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with raises(AdapterError):
        store.import_(tmp_path, "math", info=ORIGIN)
    os.mkfifo(tmp_path / WEIGHTS)
    with raises(AdapterError):
        store.import_(tmp_path, "math", info=ORIGIN)
    (tmp_path / CONFIG).write_text(" " * (2 << 20))
    with raises(AdapterError):
        store.import_(tmp_path, "math", info=ORIGIN)
    assert store.list() == ()


# --- damage ---


def truncate(directory: Path):
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size - 1)


def flip_a_byte(directory: Path):
    data = bytearray((directory / WEIGHTS).read_bytes())
    data[-2] ^= 1
    (directory / WEIGHTS).write_bytes(data)


def change_the_config(directory: Path):
    (directory / CONFIG).write_text((directory / CONFIG).read_text().replace("4", "9"))


def lose_the_sidecar(directory: Path):
    (directory / SIDECAR).unlink()


def garble_the_sidecar(directory: Path):
    (directory / SIDECAR).write_text('{"format": 1, "files": []}')


def empty_it(directory: Path):
    for entry in directory.iterdir():
        entry.unlink()


DAMAGES = [truncate, flip_a_byte, change_the_config, lose_the_sidecar, garble_the_sidecar, empty_it]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_is_quarantined_with_the_reason_and_never_loaded(store, damage):
    math1, math2 = publish(store), publish(store)
    store.activate(math1)
    store.activate(math2)
    damage(store.path(math2))
    again = AdapterStore(store.root)
    with pytest.raises((AdapterError, AdapterNotFoundError)):
        again.path(math2)
    assert again.versions("math") == (math1,)
    assert again.active == math1
    assert "math@2 is damaged" in again.warnings[0] and "math@1 is active instead" in again.warnings[0]
    [note] = (store.root / ".quarantine").glob("*.txt")
    assert note.read_text().startswith("math@2: ")
    assert note.with_suffix("").is_dir()
    assert publish(again) == PolicyVersion("math", 3)  # not 2 again
    assert AdapterStore(store.root).warnings == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_under_a_running_store_is_found_at_first_use(store, damage):
    version = publish(store)
    reader = AdapterStore(store.root)  # has not read the bytes yet
    damage(store.path(version))
    with raises(AdapterError):
        reader.path(version)
    assert reader.versions("math") == () and reader.list() == ()
    assert reader.resolve(None) == BASE


def test_listing_leaves_out_what_is_damaged(store):
    math1, math2 = publish(store), publish(store)
    lose_the_sidecar(store.path(math1))
    assert [info.version for info in store.list()] == [math2]
    assert len(store.warnings) == 1


def test_a_missing_active_version_falls_back_to_the_one_before(store):
    versions = [publish(store) for _ in range(3)]
    for version in versions:
        store.activate(version)
    for version in versions[1:]:
        store.path(version).rename(store.root.parent / str(version))
    again = AdapterStore(store.root)
    assert again.active == versions[0]
    assert [warning.split(";")[0] for warning in again.warnings] == [
        "the active version math@3 is missing",
        "the active version math@2 is missing",
    ]
    assert publish(again) == PolicyVersion("math", 4)


def test_rollback_goes_past_what_is_damaged(store):
    versions = [publish(store) for _ in range(3)]
    for version in versions:
        store.activate(version)
    flip_a_byte(store.path(versions[1]))
    again = AdapterStore(store.root)
    assert again.rollback() == versions[0]
    assert "math@2 is damaged" in again.warnings[0]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "null", "[" * 5000, '{"activations": [], "retired": {"math": 1e400}}'),
        *('{"activations": [], "retired": {"math": 1.5}}', '{"activations": [], "retired": {"math": -1}}'),
        *('{"activations": 3, "retired": {}}', '{"activations": [], "retired": []}'),
    ],
)
def test_an_unreadable_state_file_is_set_aside_and_said(store, text):
    store.activate(publish(store))
    (store.root / ".state.json").write_text(text)
    again = AdapterStore(store.root)
    assert again.active == BASE and "'base' is active" in again.warnings[0]
    assert len(list((store.root / ".quarantine").glob("state-*.json"))) == 1


def test_a_store_of_a_newer_groupwise_is_refused_and_left_as_it_is(store):
    sidecar = store.path(publish(store)) / SIDECAR
    sidecar.write_text(sidecar.read_text().replace('"format": 1', '"format": 2'))
    with raises(GroupwiseError):
        AdapterStore(store.root)
    assert sidecar.exists()


def test_a_sidecar_with_a_size_that_is_no_number_is_damaged(store):
    sidecar = store.path(publish(store)) / SIDECAR
    data = json.loads(sidecar.read_text())
    data["files"]["adapter_config.json"][0] = 1e400
    sidecar.write_text(json.dumps(data).replace("Infinity", "1e400"))
    again = AdapterStore(store.root)
    assert again.versions("math") == () and "cannot be read" in again.warnings[0]


def test_what_is_not_ours_in_the_store_is_left_alone(store):
    version = publish(store)
    (store.root / "notes.txt").write_text("mine")
    (store.root / "math" / "v7").mkdir()
    (store.root / "math" / "v0000099").mkdir()
    again = AdapterStore(store.root)
    assert again.versions("math") == (version,) and again.names() == ("math",) and again.warnings == []
    assert (store.root / "math" / "v0000099").is_dir()


class StoreAgainstModel(RuleBasedStateMachine):
    """Whatever is done, and however often the store is reopened, it agrees with a list and a counter."""

    @initialize()
    def open(self):
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.store = AdapterStore(self.folder.name)
        self.versions: list[PolicyVersion] = []
        self.last = 0
        self.activations: list[PolicyVersion] = []

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def forget(self, version):
        self.versions.remove(version)
        kept = [entry for entry in self.activations if entry != version]
        self.activations = [entry for index, entry in enumerate(kept) if index == 0 or kept[index - 1] != entry]

    @property
    def active(self):
        return self.activations[-1] if self.activations else BASE

    @rule()
    def publish(self):
        self.last += 1
        assert publish(self.store) == PolicyVersion("math", self.last)
        self.versions.append(PolicyVersion("math", self.last))

    @rule()
    def reopen(self):
        self.store = AdapterStore(self.folder.name)
        assert self.store.warnings == []

    @rule(data=st.data())
    def activate(self, data):
        version = data.draw(st.sampled_from([BASE, *self.versions]))
        self.store.activate(version)
        if version != self.active:
            self.activations.append(version)

    @precondition(lambda self: self.activations)
    @rule()
    def rollback(self):
        self.activations.pop()
        assert self.store.rollback() == self.active

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def delete(self, data):
        version = data.draw(st.sampled_from(self.versions))
        if version == self.active:
            with raises(AdapterError):
                self.store.delete(version)
        else:
            self.store.delete(version)
            self.forget(version)

    @rule(keep=st.integers(1, 3))
    def prune(self, keep):
        expected = [version for version in self.versions[:-keep] if version not in self.activations[-2:]]
        assert self.store.prune("math", keep=keep) == tuple(expected)
        for version in expected:
            self.forget(version)

    @invariant()
    def agrees(self):
        if hasattr(self, "store"):
            assert self.store.versions("math") == tuple(self.versions)
            assert self.store.active == self.active


StoreAgainstModel.TestCase.settings = settings(max_examples=15, stateful_step_count=20)
TestStoreAgainstModel = StoreAgainstModel.TestCase
