"""What users get wrong: every mistake ends with a message that names it, an exit code and no traceback."""

import json
import shutil
import sys
from contextlib import suppress

import pytest
import torch

from cli_project import Project, cli, row, write_rows
from groupwise.cli.main import app
from groupwise.store.files import WEIGHTS
from wording import wording


@pytest.fixture
def no_model(tmp_path, monkeypatch):
    """A project whose model does not exist: what fails with another message failed before loading it."""
    monkeypatch.chdir(tmp_path)
    return Project.make(tmp_path, model=tmp_path / "no-model")


def refused(*arguments, code: int, naming: str = "") -> None:
    """`groupwise ARGUMENTS...` ends with one error, which names this. What was said before it, of loading, is no part
    of it."""
    result = cli(*arguments)
    assert result.exit_code == code, result.stderr
    assert naming in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
    before, error, text = f"\n{result.stderr}".rpartition("\nerror: ")
    assert error, before
    wording(f"error: {text}")


# ---- where it goes ----


def test_no_room_behind_stdout(monkeypatch, capsys):
    """As of `groupwise rewards list > FILE` on a full disk: what a command prints is not asked for beforehand."""
    full = open("/dev/full", "w")  # noqa: SIM115  (closing it fails as well)
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as ended:
        app(["rewards", "list"])
    with suppress(OSError):
        full.close()
    said = capsys.readouterr().err
    assert ended.value.code == 75 and said.startswith("error: ") and "Traceback" not in said


# ---- the file ----


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_missing_file(command, tmp_path):
    refused(command, tmp_path / "no.yaml", code=2, naming="no.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- b\n",
        "data: {source: x\nrewards: [",
        "name: a: b\n",
        "name: a\nname: b\n",
        "data: {source: x.jsonl}\nrewards: [m:f]\nlearning_rate: 1\n",
        "data: {source: x.jsonl}\nrewards: [m:f]\nrollout:\n  group_size: 1\n",
        "data: {source: x.jsonl}\nrewards: []\n",
        "data: {source: x.jsonl}\nrewards: [m:f]\ntrain: {steps: '10'}\n",
    ],
)
def test_a_bad_file(text, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    refused("run", path, code=2, naming="bad.yaml")


def test_the_line_of_a_problem_is_named(no_model):
    text = no_model.config.read_text() + "algo:\n  clip: 3\n"
    no_model.config.write_text(text)
    line = text.splitlines().index("  clip: 3") + 1
    refused("run", no_model.config, code=2, naming=f"(run.yaml:{line})")


@pytest.mark.parametrize(
    "given", [("train.steps=ten",), ("--set", "train.steps"), ("algo.dual_clip=3", "algo.policy_loss=dro")]
)
def test_a_bad_override_is_named_as_it_was_given(no_model, given):
    refused("run", no_model.config, *given, code=2)


# ---- the data ----


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{not json}\n",
        '{"question": "2+2"}\n',
        '{"prompt": []}\n',
        '{"prompt": [{"role": "wizard", "content": "hi"}]}\n',
    ],
)
def test_a_bad_dataset(no_model, line):
    (no_model.folder / "prompts.jsonl").write_text(line)
    refused("run", no_model.config, code=2, naming="prompts.jsonl")


def test_a_dataset_that_is_not_there(no_model):
    refused("run", no_model.config, "data.source=promts.jsonl", code=2, naming="promts.jsonl")


def test_a_prompt_that_does_not_fit_the_context(project):
    long = {"prompt": [{"role": "user", "content": "7 " * 300}], "answer": "7", "kind": "odd"}
    write_rows(project.folder / "held_out.jsonl", [long])
    refused("run", project.config, code=2, naming="256")
    write_rows(project.folder / "prompts.jsonl", [long, long])
    refused("run", project.config, "eval=null", "run_dir=out", code=2, naming="255")
    refused("check", project.config, "eval=null", code=2, naming="256")


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_template_that_refuses_the_roles(project, model_dir, tmp_path, command):
    model = tmp_path / "model"
    save = save_copy(model_dir, model)
    save("{% for m in messages %}{{ raise_exception('only users may speak') if m.role != 'user' else m.content }}"
         "{% endfor %}")  # fmt: skip
    for name in ("prompts.jsonl", "held_out.jsonl"):
        rows = [row(i) for i in range(2)]
        write_rows(
            project.folder / name,
            [r | {"prompt": [{"role": "system", "content": "Be short."}, *r["prompt"]]} for r in rows],
        )
    refused(command, project.config, f"model={model}", code=2, naming="only users may speak")


def save_copy(source, target):
    shutil.copytree(source, target)
    return lambda template: (target / "chat_template.jinja").write_text(template)


# ---- the rewards ----


@pytest.mark.parametrize("reward", ["my_reward:vowels", "my_rewards:vowel", "my_rewards.py", "my_rewards:needs_gold"])
def test_a_reward_that_cannot_be_used(no_model, reward):
    refused("run", no_model.config, f"rewards[0]={reward}", code=2)


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("reward", ["short_list", "not_a_number", "words", "raises"])
def test_a_reward_that_fails_stops_it_with_its_cause(project, command, reward):
    refused(command, project.config, "eval=null", f"rewards[0]=my_rewards:{reward}", code=1, naming=reward)


# ---- the model and adapters ----


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_model_that_is_not_there(no_model, command):
    refused(command, no_model.config, code=3, naming="no-model")


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_a_model_that_is_damaged(project, model_dir, tmp_path, damage):
    save_copy(model_dir, tmp_path / "model")
    name = {"weights": "model.safetensors", "config": "config.json"}[damage]
    (tmp_path / "model" / name).write_bytes(b"\x08\x00")
    refused("eval", project.config, f"model={tmp_path / 'model'}", code=3, naming="model")


def test_a_gpu_that_is_not_there(project):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    refused("check", project.config, "device=cuda", code=3, naming="cuda")


@pytest.mark.parametrize("name", ["nothing", "runs/none/toy@3", "toy@1"])
def test_an_adapter_that_is_not_there(no_model, name):
    refused("eval", no_model.config, "--adapter", name, code=2, naming=name)


def damaged_adapters(adapter, tmp_path):
    """A directory for each kind of damage."""

    def copy(name):
        return shutil.copytree(adapter, tmp_path / name)

    torn = copy("torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-64])
    yield torn
    empty = copy("empty")
    (empty / WEIGHTS).unlink()
    yield empty
    nonsense = copy("nonsense")
    (nonsense / "adapter_config.json").write_text("{")
    yield nonsense
    dora = copy("dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    yield dora
    pickled = copy("pickled")
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04.")
    yield pickled


def test_an_adapter_directory_that_is_damaged(no_model, make_base, make_adapter, tmp_path):
    adapter = make_adapter(make_base("qwen3", dtype=torch.float32, context=256))
    for directory in damaged_adapters(adapter, tmp_path):
        refused("eval", no_model.config, "--adapter", directory, code=1, naming=directory.name)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT's remark on GPT-2
def test_an_adapter_of_another_architecture(project, make_base, make_adapter):
    other = make_adapter(make_base("gpt2", dtype=torch.float32, context=256))
    refused("eval", project.config, "--adapter", other, code=1)
