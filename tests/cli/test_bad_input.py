"""What users get wrong: every mistake ends with a message that names it, an exit code and no traceback."""

import json
import shutil

import pytest
import torch

from cli_project import Project, cli, row, write_rows
from groupwise.store.files import WEIGHTS


@pytest.fixture
def no_model(tmp_path, monkeypatch):
    """A project whose model does not exist: what fails with another message failed before loading it."""
    monkeypatch.chdir(tmp_path)
    return Project.make(tmp_path, model=tmp_path / "no-model")


def refused(*arguments, code: int, saying: str) -> str:
    result = cli(*arguments)
    assert result.exit_code == code, result.stderr
    assert saying in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


# ---- the file ----


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_missing_file(command, tmp_path):
    refused(command, tmp_path / "no.yaml", code=2, saying="cannot read the configuration")


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "holds a list at the top level"),
        ("data: {source: x\nrewards: [", "malformed YAML"),
        ("name: a: b\n", "line 1"),
        ("name: a\nname: b\n", "duplicate key"),
        ("data: {source: x.jsonl}\nrewards: [m:f]\nlearning_rate: 1\n", "did you mean train.learning_rate?"),
        ("data: {source: x.jsonl}\nrewards: [m:f]\nrollout:\n  group_size: 1\n", "at least 2 completions"),
        ("data: {source: x.jsonl}\nrewards: []\n", "rewards"),
        ("data: {source: x.jsonl}\nrewards: [m:f]\ntrain: {steps: '10'}\n", "train.steps"),
    ],
)
def test_a_bad_file(text, saying, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert "bad.yaml" in refused("run", path, code=2, saying=saying)


def test_the_line_of_a_problem_is_named(no_model):
    text = no_model.config.read_text() + "algo:\n  clip: 3\n"
    no_model.config.write_text(text)
    line = text.splitlines().index("  clip: 3") + 1
    refused("run", no_model.config, code=2, saying=f"(run.yaml:{line})")


def test_a_bad_override_is_named_as_it_was_given(no_model):
    refused("run", no_model.config, "train.steps=ten", code=2, saying="given as 'train.steps=ten'")
    refused("run", no_model.config, "--set", "train.steps", code=2, saying="is not an override; write key=value")
    refused("run", no_model.config, "algo.dual_clip=3", "algo.policy_loss=dro", code=2, saying="dual_clip")


# ---- the data ----


@pytest.mark.parametrize(
    ("line", "saying"),
    [
        ("", "has no rows"),
        ("{not json}\n", "prompts.jsonl:1: invalid JSON"),
        ('{"question": "2+2"}\n', "no 'prompt' and no 'messages'"),
        ('{"prompt": []}\n', "an empty list"),
        ('{"prompt": [{"role": "wizard", "content": "hi"}]}\n', "wizard"),
    ],
)
def test_a_bad_dataset(no_model, line, saying):
    (no_model.folder / "prompts.jsonl").write_text(line)
    refused("run", no_model.config, code=2, saying=saying)


def test_a_dataset_that_is_not_there(no_model):
    refused("run", no_model.config, "data.source=promts.jsonl", code=2, saying="did you mean prompts.jsonl?")


def test_a_prompt_that_does_not_fit_the_context(project):
    long = {"prompt": [{"role": "user", "content": "7 " * 300}], "answer": "7", "kind": "odd"}
    write_rows(project.folder / "held_out.jsonl", [long])
    refused("run", project.config, code=2, saying="256")
    write_rows(project.folder / "prompts.jsonl", [long, long])
    refused("run", project.config, "eval=null", "run_dir=out", code=2, saying="more than 255 tokens")
    refused("check", project.config, "eval=null", code=2, saying="fill the context of 256 tokens")


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
    refused(command, project.config, f"model={model}", code=2, saying="only users may speak")


def save_copy(source, target):
    shutil.copytree(source, target)
    return lambda template: (target / "chat_template.jinja").write_text(template)


# ---- the rewards ----


@pytest.mark.parametrize(
    ("reward", "saying"),
    [
        ("my_reward:vowels", "did you mean my_rewards?"),
        ("my_rewards:vowel", "did you mean vowels?"),
        ("my_rewards.py", "is not a reference"),
        ("my_rewards:needs_gold", "needs 'gold' as a column"),
    ],
)
def test_a_reward_that_cannot_be_used(no_model, reward, saying):
    refused("run", no_model.config, f"rewards[0]={reward}", code=2, saying=saying)


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("short_list", "returned 1 values for 3 completions"),
        ("not_a_number", "returned nan"),
        ("words", "returned 'good' (str)"),
        ("raises", "RuntimeError: the judge is out"),
    ],
)
def test_a_reward_that_fails_stops_the_run_with_its_cause(project, reward, cause):
    said = refused("run", project.config, "eval=null", f"rewards[0]=my_rewards:{reward}", code=1, saying=cause)
    assert "no reward for any of 12 completions in a row" in said
    refused(
        "check", project.config, f"rewards[0]=my_rewards:{reward}", code=1, saying=cause.replace("3 comp", "4 comp")
    )


# ---- the model and adapters ----


@pytest.mark.parametrize("command", ["run", "check", "eval"])
def test_a_model_that_is_not_there(no_model, command):
    refused(command, no_model.config, code=3, saying="no-model")


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_a_model_that_is_damaged(project, model_dir, tmp_path, damage):
    save_copy(model_dir, tmp_path / "model")
    name = {"weights": "model.safetensors", "config": "config.json"}[damage]
    (tmp_path / "model" / name).write_bytes(b"\x08\x00")
    refused("eval", project.config, f"model={tmp_path / 'model'}", code=3, saying="cannot be loaded")


def test_a_gpu_that_is_not_there(project):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    refused("check", project.config, "device=cuda", code=3, saying="torch sees no such GPU")


@pytest.mark.parametrize("name", ["nothing", "runs/none/toy@3", "toy@1"])
def test_an_adapter_that_is_not_there(no_model, name):
    refused("eval", no_model.config, "--adapter", name, code=2, saying="no ")


def damaged_adapters(adapter, tmp_path):
    """(directory, what is said) for each kind of damage."""

    def copy(name):
        return shutil.copytree(adapter, tmp_path / name)

    torn = copy("torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-64])
    yield torn, "is not a whole safetensors file"
    empty = copy("empty")
    (empty / WEIGHTS).unlink()
    yield empty, "adapter_model.safetensors is missing"
    nonsense = copy("nonsense")
    (nonsense / "adapter_config.json").write_text("{")
    yield nonsense, "is not JSON"
    dora = copy("dora")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    yield dora, "has a magnitude of shape None; with use_dora true it must be"
    pickled = copy("pickled")
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04.")
    yield pickled, "may hold a pickle"


def test_an_adapter_directory_that_is_damaged(no_model, make_base, make_adapter, tmp_path):
    adapter = make_adapter(make_base("qwen3", dtype=torch.float32, context=256))
    for directory, saying in damaged_adapters(adapter, tmp_path):
        refused("eval", no_model.config, "--adapter", directory, code=1, saying=saying)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT's remark on GPT-2
def test_an_adapter_of_another_architecture(project, make_base, make_adapter):
    other = make_adapter(make_base("gpt2", dtype=torch.float32, context=256))
    refused("eval", project.config, "--adapter", other, code=1, saying="trained on another base model")
