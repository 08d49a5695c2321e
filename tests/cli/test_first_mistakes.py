"""The mistakes of a first hour, as a table: each ends with an exit code and a message that says what is wrong, with the
value, and what is valid or what to do; without a traceback, and, where it can be known, before torch is imported."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli_project import Project, cli
from groupwise.config.run import STARTER_DIR
from groupwise.server.listen import StartError, bind
from groupwise.store.rundir import owned
from light_commands import LightCommands, light_commands
from wire_server import wire_server
from wording import raises, wording

Change = Callable[[Path], object]
AWAY = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # where nobody listens
SERVER = "http://127.0.0.1:9"
USAGE, START, REFUSED_KEY, SERVER_AWAY = 2, 3, 4, 75


def nothing(folder: Path) -> None:
    pass


def text(name: str, content: str | bytes) -> Change:
    """A file of the project with another content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def line(old: str, new: str) -> Change:
    """run.yaml with another line."""

    def change(folder: Path) -> None:
        before = (folder / "run.yaml").read_text()
        assert old in before
        (folder / "run.yaml").write_text(before.replace(old, new))

    return change


def model_without(*patterns: str) -> Change:
    """A directory `m` with the starter, less some of its files."""

    def change(folder: Path) -> None:
        shutil.copytree(STARTER_DIR, folder / "m")
        for pattern in patterns:
            for path in (folder / "m").glob(pattern):
                path.unlink()

    return change


def adapter(folder: Path) -> None:
    (folder / "m").mkdir()
    (folder / "m" / "adapter_config.json").write_text("{}")


def a_run(folder: Path) -> None:
    directory = folder / "runs" / "arithmetic-20260101T120000Z"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1, "time": "x"}\n')


def untrained(folder: Path) -> None:
    a_run(folder)
    shutil.copy(folder / "run.yaml", folder / "runs" / "arithmetic-20260101T120000Z" / "config.yaml")


def folder_named(name: str) -> Change:
    return lambda folder: (folder / name).mkdir()


@dataclass(frozen=True)
class Mistake:
    """`groupwise WORDS`, after `change`, and the exit code."""

    words: str
    code: int
    change: Change = nothing


RUN = "run run.yaml"
SUMS = text("sums.csv", "sum,gold\n1+1,2\n")
PROMPTS = "prompts.jsonl"
MISTAKES = {
    # names
    "model": Mistake(f"{RUN} model=startre", START),
    "settings, served": Mistake("serve run.yaml --port 0", USAGE),
    "model, served": Mistake("serve startre --port 0", START),
    "model's directory": Mistake(f"{RUN} model=./mm", START, model_without()),
    "model without network": Mistake(f"{RUN} model=Qwen/Qwen9", START),
    "model's spelling": Mistake(f"{RUN} model=a//b", START),
    "run": Mistake("health aritmetic", USAGE, a_run),
    "run, reported": Mistake("report aritmetic", USAGE, a_run),
    "run, untrained": Mistake("chat arithmetic", USAGE, untrained),
    "run, served untrained": Mistake("serve arithmetic --port 0", USAGE, untrained),
    "run, shown": Mistake("ui aritmetic", USAGE, a_run),
    "adapter": Mistake("eval run.yaml --adapter toy@9", USAGE),
    "loss": Mistake(f"{RUN} algo.policy_loss=grop", USAGE),
    "reward": Mistake(f"{RUN} rewards[0]=my_rewards:vowel", USAGE),
    "reward's module": Mistake(f"{RUN} rewards[0]=my_reward:vowels", USAGE),
    "reward of the library": Mistake(f"{RUN} rewards[0]=groupwise.rewards.text:exact_mach", USAGE),
    "reward without module": Mistake(f"{RUN} rewards[0]=vowels", USAGE),
    "reward's file": Mistake(f"{RUN} rewards[0]=my_reward.py:vowels", USAGE),
    "reward's file, elsewhere": Mistake(f"{RUN} rewards[0]=../lib/scores.py:vowels", USAGE),
    "file without a function": Mistake(f"{RUN} rewards[0]=my_rewards.py", USAGE),
    "command": Mistake("rnu", USAGE),
    "option": Mistake("serve --prt 3", USAGE),
    "option of run": Mistake(f"{RUN} --stepz 3", USAGE),
    "key": Mistake(RUN, USAGE, line("learning_rate", "lerning_rate")),
    "key, overridden": Mistake(f"{RUN} algo.clip_lo=0.1", USAGE),
    "mode": Mistake("eval run.yaml --mode gready", USAGE),
    # types
    "word for number": Mistake(f"{RUN} train.steps=ten", USAGE),
    "string for number": Mistake(RUN, USAGE, line("steps: 3", "steps: '3'")),
    "quoted rate": Mistake(RUN, USAGE, line("0.01", "'2e-5'")),
    "string for mapping": Mistake(RUN, USAGE, line("{source: prompts.jsonl}", PROMPTS)),
    "list for mapping": Mistake(RUN, USAGE, line("{prompts_per_step: 2, group_size: 3, max_tokens: 6}", "[1, 2]")),
    "string for list": Mistake(RUN, USAGE, line("[my_rewards:vowels]", "my_rewards:vowels")),
    "mapping for list": Mistake(RUN, USAGE, line("[my_rewards:vowels]", "{function: my_rewards:vowels}")),
    "small group": Mistake(f"{RUN} rollout.group_size=1", USAGE),
    "negative rate": Mistake(f"{RUN} train.learning_rate=-1", USAGE),
    "no value": Mistake(f"{RUN} train.steps", USAGE),
    # columns and rows
    "no prompt": Mistake(RUN, USAGE, text(PROMPTS, '{"question": "2+2?"}\n')),
    "no prompt in a table": Mistake(f"{RUN} data.source=sums.csv", USAGE, SUMS),
    "prompt's column": Mistake(f"{RUN} data.source=sums.csv data.prompt_key=sun", USAGE, SUMS),
    "no answer": Mistake(
        f"{RUN} rewards[0]=groupwise.rewards.text:exact_match eval=null",
        USAGE,
        text(PROMPTS, '{"prompt": "2+2?", "kind": "odd"}\n'),
    ),
    "no answer in some rows": Mistake(
        f"{RUN} rewards[0]=groupwise.rewards.text:exact_match eval=null",
        USAGE,
        text(PROMPTS, '{"prompt": "1?", "answer": "1"}\n{"prompt": "2?"}\n{"prompt": "3?", "answer": "3"}\n'),
    ),
    "number for prompt": Mistake(RUN, USAGE, text(PROMPTS, '{"prompt": 4}\n')),
    "empty prompt": Mistake(RUN, USAGE, text(PROMPTS, '{"prompt": ""}\n')),
    "no messages": Mistake(RUN, USAGE, text(PROMPTS, '{"prompt": []}\n')),
    "role": Mistake(RUN, USAGE, text(PROMPTS, '{"prompt": [{"role": "wizard", "content": "hi"}]}\n')),
    "empty file": Mistake(RUN, USAGE, text(PROMPTS, "")),
    "bad line": Mistake(RUN, USAGE, text(PROMPTS, '{"prompt": "a"}\n' * 2 + "{")),
    "bad line in the middle": Mistake(
        RUN, USAGE, text(PROMPTS, '{"prompt": "a"}\n' * 2 + '{"prompt": "x", answer: 3}\n' + '{"prompt": "b"}\n' * 4)
    ),
    "row": Mistake(RUN, USAGE, text(PROMPTS, "[1]\n")),
    "encoding": Mistake(RUN, USAGE, text(PROMPTS, b'{"prompt": "caf\xe9"}\n')),
    # paths
    "data": Mistake(f"{RUN} data.source=promts.jsonl", USAGE),
    "data's directory": Mistake(f"{RUN} data.source=d.jsonl", USAGE, folder_named("d.jsonl")),
    "data at home": Mistake(f"{RUN} data.source=~/no/such.jsonl", USAGE),
    "data's kind": Mistake(f"{RUN} data.source=a.txt", USAGE, text("a.txt", "hi")),
    "configuration": Mistake("run rn.yaml", USAGE),
    "configuration's directory": Mistake("run .", USAGE),
    "empty configuration": Mistake(RUN, USAGE, text("run.yaml", "")),
    "malformed configuration": Mistake(RUN, USAGE, text("run.yaml", "data: {source: x\nrewards: [")),
    "tab": Mistake(RUN, USAGE, text("run.yaml", "data:\n\tsource: x\n")),
    "key twice": Mistake(RUN, USAGE, line("rewards:", "model: other\nrewards:")),
    "no configuration": Mistake("run", USAGE),
    "model without tokenizer": Mistake(f"{RUN} model=m", START, model_without("*token*", "vocab*", "merges*")),
    "model without config": Mistake(f"{RUN} model=m", START, model_without("config.json")),
    "model without weights": Mistake(f"{RUN} model=m", START, model_without("*.safetensors")),
    "adapter for model": Mistake(f"{RUN} model=m", START, adapter),
    "file for model": Mistake(f"{RUN} model={PROMPTS}", START),
    # ports, hosts, keys, disk
    "port": Mistake("serve --port abc", USAGE),
    "large port": Mistake("serve --port 70000", USAGE),
    "open host": Mistake("serve --host 0.0.0.0", USAGE),
    "state directory": Mistake("serve --port 0 --state-dir prompts.jsonl", START),
    "no server": Mistake(f"chat hi --url {SERVER}", SERVER_AWAY),
    "output": Mistake(f"{RUN} output_dir={PROMPTS}/x", USAGE),
    "tracker": Mistake(f"{RUN} tracking.trackio=x", USAGE),
}


@pytest.fixture(scope="module")
def groupwise() -> Iterator[LightCommands]:
    with light_commands() as run:
        yield run


def refused(code: int, stderr: str, expected: int) -> None:
    """One message, without a traceback. What was said before it, of loading, is no part of it."""
    assert "Traceback" not in stderr and code == expected, stderr
    wording(f"\n{stderr}".rpartition("\nerror: ")[2].replace(f"{Path.home()}/no/", "~/no/"))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_torch_is_imported(name: str, groupwise: LightCommands, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    Project.make(tmp_path, model="starter")
    mistake.change(tmp_path)
    ended = groupwise(*mistake.words.split(), folder=tmp_path, environment={**AWAY, "HF_HOME": str(tmp_path / "hf")})
    refused(ended.code, ended.stderr, mistake.code)
    assert not ended.torch and not ended.stdout
    assert not (tmp_path / "runs").exists() or mistake.change in (a_run, untrained)


def test_a_model_that_is_not_there_is_asked_for_once(groupwise: LightCommands, tmp_path: Path) -> None:
    """The hub's libraries would try five times, with longer and longer pauses."""
    Project.make(tmp_path, model="starter")
    with socket.create_server(("127.0.0.1", 0)) as hub:
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        hub.settimeout(0)
        hub.close()  # refuses from now on
        away = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        ended = groupwise("run", "run.yaml", "model=a/b", folder=tmp_path, environment=away)
    assert ended.stderr.count("does not answer") == 1 and "retry" not in ended.stderr.lower()


@pytest.mark.parametrize("command", [("serve",), ("ui", "arithmetic")], ids=lambda words: words[0])
def test_a_port_in_use(command: tuple[str, ...], groupwise: LightCommands, tmp_path: Path) -> None:
    a_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = groupwise(*command, "--port", port, folder=tmp_path)
    assert f"port {port}" in ended.stderr and f"process {os.getpid()}" in ended.stderr
    refused(ended.code, ended.stderr, START)


def test_a_port_that_is_the_administrators(tmp_path: Path) -> None:
    lowest = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not lowest.exists() or int(lowest.read_text()) <= 81:
        pytest.skip("every port is open to everybody here")
    "a.b".encode("idna")  # Python reads this codec from its own folder, which may be root's
    with raises(StartError) as refused:
        without_root(lambda: bind("127.0.0.1", 81), tmp_path)
    assert refused.value.exit_code == START


def test_a_key_that_the_server_does_not_know(groupwise: LightCommands, tmp_path: Path) -> None:
    with wire_server(api_key="right") as server:
        for words, key in ((["--api-key", "hunter2"], {}), ([], {"GROUPWISE_API_KEY": "hunter2"}), ([], {})):
            ended = groupwise("chat", "hi", "--url", server.url, *words, folder=tmp_path, environment=key)
            refused(ended.code, ended.stderr, REFUSED_KEY)
            assert "hunter2" not in ended.stderr
        assert groupwise("chat", "hi", "--url", server.url, "--api-key", "right", folder=tmp_path).code == 0


def test_a_run_that_another_process_trains(groupwise: LightCommands, tmp_path: Path) -> None:
    Project.make(tmp_path, model="starter")
    with owned(tmp_path / "mine"):
        ended = groupwise("run", "run.yaml", "run_dir=mine", folder=tmp_path)
    refused(ended.code, ended.stderr, 75)


# ---- what this user may not do ----


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (RUN, "run.yaml", USAGE),
        ("check run.yaml", PROMPTS, USAGE),
        (f"{RUN} output_dir=closed/runs", "closed", USAGE),
    ],
    ids=["configuration", "data", "output"],
)
def test_what_this_user_may_not_read_or_write(
    words: str, closed: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Project.make(tmp_path, model="starter")
    (tmp_path / "closed").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / closed).chmod(0o000 if (tmp_path / closed).is_file() else 0o555)
    ended = without_root(lambda: cli(*words.split()), tmp_path)
    refused(ended.exit_code, ended.stderr, code)


def without_root(call: Callable[[], object], folder: Path):
    """`call` as an ordinary user, who may look into `folder`."""
    if os.geteuid() != 0:
        return call()
    opened = [each for each in (folder, *folder.parents) if not each.stat().st_mode & 0o005]
    modes = {each: each.stat().st_mode for each in opened}
    for each in opened:
        each.chmod(modes[each] | 0o055)
    os.seteuid(65534)
    try:
        return call()
    finally:
        os.seteuid(0)
        for each, mode in modes.items():
            each.chmod(mode)


# ---- rewards: they are found out when they are first called ----

REWARDS = """
def none(completions, **columns):
    return None

def nones(completions, **columns):
    return [None] * len(completions)

def two_each(completions, **columns):
    return [0.0, 1.0] * len(completions)

def text(completions, **columns):
    return "good"

def nans_in_numpy(completions, **columns):
    import numpy
    return numpy.full(len(completions), numpy.nan)

def of_numbers(completions, **columns):
    return [float(each.strip() == "1") for each in completions]

def prints(completions, **columns):
    print("I was called")
    return [float(len(each[0]["content"])) for each in completions]

def takes_text(text):
    return 1.0
"""


@pytest.mark.parametrize(
    ("reward", "code"),
    [
        ("my_rewards:short_list", 1),
        ("my_rewards:not_a_number", 1),
        ("my_rewards:words", 1),
        ("my_rewards:raises", 1),
        ("others:none", 1),
        ("others:takes_text", 2),
        ("others:two_each", 1),
        ("others:text", 1),
        ("others:nans_in_numpy", 1),
        ("others:of_numbers", 1),
    ],
)
def test_a_reward_that_answers_wrongly(reward: str, code: int, project: Project) -> None:
    (project.folder / "others.py").write_text(REWARDS)
    ended = cli("check", project.config, f"rewards[0]={reward}")
    refused(ended.exit_code, ended.stderr, code)


@pytest.mark.slow
def test_a_reward_that_prints_does_not_spoil_the_json(project: Project) -> None:
    (project.folder / "others.py").write_text(REWARDS)
    ended = cli("check", project.config, "rewards[0]=others:prints", "--json")
    assert ended.exit_code == 0 and json.loads(ended.stdout)["completions"]
    assert "I was called" in ended.stderr


def test_there_are_the_mistakes_of_a_first_hour() -> None:
    assert len(MISTAKES) >= 48
