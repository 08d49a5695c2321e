"""Programs that play episodes as processes of their own: what they get, what they leave, and every way to fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from groupwise.config.harness import HarnessConfig
from groupwise.config.run import EnvConfig
from groupwise.engine.local import LocalEngine
from groupwise.errors import ConfigError, EnvError
from groupwise.model.load import LoadedModel
from groupwise.rewards.sandbox import Box, isolation, trusted
from groupwise.tasks.agent_rollouts import AgentRollouts
from groupwise.tasks.harness import ISOLATED_FILES, ISOLATED_MEMORY_MB, ISOLATED_PROCESSES, Harness, load_harness
from groupwise.tasks.rollout_sources import play_all
from groupwise.types import PolicyVersion, Prompt, Rollout, SamplingParams
from serving import comes_within
from wording import raises

needs_namespaces = pytest.mark.skipif(
    not isolation().namespaces, reason="this machine allows no namespaces (groupwise doctor)"
)

ASK = """
import json, os, sys, urllib.error, urllib.request


def ask(text, **options):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}], **options}).encode()
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
ASKS = "said = ask('What is 47 + 138?')\nopen('said.txt', 'w').write(said)\n"
Play = Callable[..., list[Rollout]]


@pytest.fixture
def play(tmp_path: Path, starter_engine: LocalEngine, starter: LoadedModel) -> Iterator[Play]:
    """`play("python code", n=2, row={...}, episode={...}, **harness)`: a group; `episode` is the rest of `env`."""
    opened: list[AgentRollouts] = []

    def run(
        code: str, *, n: int = 1, row: dict[str, Any] | None = None, episode: dict[str, Any] | None = None, **given: Any
    ) -> list[Rollout]:
        (tmp_path / "agent.py").write_text(ASK + code)
        usual = {"command": ["python", "{folder}/agent.py"], "score": {"command": ["test", "-e", "said.txt"]}}
        harness = HarnessConfig.model_validate(usual | given)
        config = EnvConfig(harness=harness, **(episode or {}))
        agent = load_harness(config, folder=tmp_path, scored=harness.score is None)
        prompt = Prompt(id="row 0", columns=row or {"question": "What is 47 + 138?"})
        assert isinstance(agent.function, Harness)
        agent.function.check([prompt])
        opened.append(AgentRollouts(starter_engine, starter.tokenizer, agent, config, scored=harness.score is None))
        params, version = SamplingParams(max_tokens=24), PolicyVersion.base()
        (group,) = asyncio.run(play_all(opened[-1], [prompt], seeds=[5], n=n, params=params, version=version))
        return list(group.rollouts)

    yield run
    for each in opened:
        each.close()


# ---- what a program gets, and what is recorded ----
def test_a_program_asks_and_its_workspace_is_scored(play):
    rollouts = play(ASKS + "print('done'); print('late', file=sys.stderr)", n=3)
    for rollout in rollouts:
        assert (rollout.reward, rollout.error, rollout.stop) == (1.0, None, "done")
        assert len(rollout.turns) == 1 and rollout.turns[0].completion.token_ids
        assert rollout.columns["exit_status"] == 0 and rollout.columns["stdout"] == "done\n"
        assert rollout.columns["stderr"] == "late\n" and rollout.columns["score_status"] == "ok"
        assert rollout.info["program_failed"] == 0 and rollout.info["program_s"] > 0
    assert len({rollout.turns[0].completion.logprobs for rollout in rollouts}) > 1  # each episode draws its own


def test_it_is_told_where_to_ask_and_nothing_of_this_process(play, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("WANTED", "yes")
    code = "ask('hi')\nprint(json.dumps(dict(os.environ, cwd=os.getcwd())))"
    (rollout,) = play(code, inherit=["WANTED"], score={"command": ["true"]})
    told = json.loads(rollout.columns["stdout"])
    assert "SECRET_TOKEN" not in told and told["WANTED"] == "yes"
    assert told["OPENAI_BASE_URL"].endswith("/v1") and told["OPENAI_API_BASE"] == told["OPENAI_BASE_URL"]
    assert told["ANTHROPIC_BASE_URL"] == told["OPENAI_BASE_URL"].removesuffix("/v1")
    assert told["OPENAI_API_KEY"] == told["ANTHROPIC_API_KEY"] and told["OPENAI_API_KEY"].startswith("episode-")
    assert told["OPENAI_MODEL"] == told["ANTHROPIC_MODEL"] == told["ANTHROPIC_SMALL_FAST_MODEL"]
    assert told["HOME"] != os.environ.get("HOME") and told["cwd"].endswith("/workspace")


def test_the_task_comes_by_arguments_stdin_files_and_environment(play, tmp_path):
    (tmp_path / "repos" / "a").mkdir(parents=True)
    (tmp_path / "repos" / "a" / "old.txt").write_text("template")
    code = (
        "ask('hi')\n"
        "texts = [open(name).read() for name in ('TASK.md', 'src/x.py', 'old.txt')]\n"
        "print(json.dumps([sys.argv[1:], sys.stdin.read(), os.environ['N'], *texts]))"
    )
    (rollout,) = play(
        code,
        command=["python", "{folder}/agent.py", "{question}", '{"json": [1]} ${HOME} {{question}}', "{numbers}"],
        stdin="Q: {question}",
        template="repos/{repo}",
        files={"TASK.md": "Do: {prompt}"},
        files_column="sources",
        env={"N": "{numbers}"},
        row={
            "question": "a {b} c",
            "numbers": [1, 2],
            "repo": "a",
            "prompt": [{"role": "user", "content": "all"}],
            "sources": {"src/x.py": "x = {not_a_place}\n", "none.py": None},
        },
        score={"command": ["true"]},
    )
    assert rollout.error is None
    told = json.loads(rollout.columns["stdout"])
    assert told[:3] == [["a {b} c", '{"json": [1]} ${HOME} {{question}}', "[1, 2]"], "Q: a {b} c", "[1, 2]"]
    assert told[3:] == ["Do: all", "x = {not_a_place}\n", "template"]


def test_episodes_do_not_share_a_workspace_and_leave_none(play, tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "count.txt").write_text("0")
    code = ASKS + "n = int(open('count.txt').read()) + 1\nopen('count.txt', 'w').write(str(n))\nprint(os.getcwd())"
    rollouts = play(code, n=3, template="repo", score={"command": ["grep", "-x", "1", "count.txt"]})
    places = {rollout.columns["stdout"].strip() for rollout in rollouts}
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3 and len(places) == 3
    assert (tmp_path / "repo" / "count.txt").read_text() == "0"
    deadline = time.monotonic() + 30
    while any(map(os.path.exists, places)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(os.path.exists, places))


# ---- what it is worth ----
def test_tests_are_put_over_what_the_program_made_of_them(play):
    """It edited the test, made a link of another and a directory of a third: the row's own count."""
    code = (
        ASKS + "os.makedirs('tests/c.py')\nopen('tests/a.py', 'w').write('')\nos.symlink('/etc/passwd', 'tests/b.py')\n"
    )
    tests = {f"tests/{name}.py": "import sys; sys.exit(3)" for name in "abc"}
    for name in "abc":
        score = {"command": ["python", f"tests/{name}.py"], "files_column": "tests"}
        (rollout,) = play(code, score=score, row={"tests": tests})
        assert (rollout.reward, rollout.columns["score_status"]) == (0.0, "error"), rollout.columns


CHEATS = {
    "relative": "os.symlink('expected.txt', 'answer.txt')",
    "absolute": "os.symlink(os.path.abspath('expected.txt'), 'answer.txt')",
    "chain": "os.symlink('expected.txt', 'b'); os.symlink('b', 'answer.txt')",
    "link in the place": "os.mkdir('a'); os.symlink('a', 'expected.txt'); os.symlink('expected.txt', 'answer.txt')",
    "file in the place": "open('expected.txt', 'w').write('5'); os.symlink('expected.txt', 'answer.txt')",
    "hard link": "open('expected.txt', 'w').write('5'); os.link('expected.txt', 'answer.txt')",
    "folder": "os.symlink('.', 'self'); os.symlink('self/expected.txt', 'answer.txt')",
    "over": "os.symlink('../over/expected.txt', 'answer.txt')",
    "outside": "os.symlink('/proc/self/cwd/expected.txt', 'answer.txt')",
    "loop": "os.symlink('answer.txt', 'answer.txt')",
    "pipe": "os.mkfifo('answer.txt')",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_link_makes_an_answer_of_what_is_expected(play, cheat):
    (rollout,) = play(
        f"ask('hi')\n{CHEATS[cheat]}\n",
        score={"command": ["cmp", "answer.txt", "expected.txt"], "files": {"expected.txt": "185\n"}},
    )
    assert rollout.error is None and rollout.columns["exit_status"] == 0, rollout.columns["stderr"]
    assert (rollout.reward, rollout.columns["score_status"]) == (0.0, "error")


def test_a_folder_of_what_is_expected_is_linked_to_by_nothing(play):
    links = "os.mkdir('tests'); os.symlink('tests', 'mine'); os.symlink('mine/expected.txt', 'answer.txt')"
    command = ["sh", "-c", "test ! -e answer.txt && test ! -e mine && test -f tests/expected.txt"]
    score = {"command": command, "files": {"tests/expected.txt": "185"}}
    (rollout,) = play(f"ask('hi')\n{links}\n", score=score)
    assert rollout.reward == 1.0, rollout.columns["score_output"]


def test_links_between_files_of_the_program_are_scored(play):
    code = """
ask('hi')
os.makedirs('lib/deep'); os.mkdir('bin')
open('lib/deep/run', 'w').write('said')
os.symlink('../lib/deep', 'bin/deep'); os.symlink('deep/run', 'bin/run'); os.symlink(os.path.abspath('lib'), 'all')
"""
    check = "cat bin/run all/deep/run bin/deep/run && test -L bin/run && test -L all"
    (rollout,) = play(code, score={"command": ["sh", "-c", check], "files": {"expected/x": "1"}})
    assert rollout.reward == 1.0 and rollout.columns["score_output"] == "saidsaidsaid"


def test_a_command_may_say_a_number(play):
    for said, reward in (("print('x'); print(0.25)", 0.25), ("print('none')", 0.0), ("print('nan')", 0.0)):
        score = {"command": ["python", "-c", said], "reward": "stdout"}
        (rollout,) = play(ASKS, score=score)
        assert rollout.reward == reward and said[7:8] in rollout.columns["score_output"]


def test_a_separator_of_lines_ends_no_line_of_what_a_command_says(play):
    """U+2028 in a text of the object, which `ensure_ascii=False` leaves as it is."""
    said = "import json; print(json.dumps({'reward': 0.5, 'metrics': {'a\\u2028b': 1}}, ensure_ascii=False))"
    score = {"command": ["python", "-X", "utf8", "-c", said], "reward": "stdout"}
    (rollout,) = play(ASKS, score=score)
    assert rollout.reward == 0.5


SAYS = """import json
said = [len(line) > 0 for line in open('said.txt')]
print(json.dumps({'reward': 2, 'turn_rewards': %s, 'metrics': {'lines': len(said)}}))"""


def test_a_command_may_say_what_each_turn_was_worth(play):
    """In a JSON object in the last line; as many as the policy answered, or the episode has failed and says so."""
    score = {"command": ["python", "-c", SAYS % "[0.5, None]"], "reward": "stdout"}
    (rollout,) = play(ASKS + "ask('Sure?')", score=score)
    assert [turn.reward for turn in rollout.turns] == [0.5, None] and rollout.reward == 2.5
    assert rollout.info["lines"] >= 1 and rollout.info["program_failed"] == 0
    (rollout,) = play(ASKS, score=score)
    assert rollout.reward is None and "returned 2 turn_rewards, and the policy answered 1 times" in str(rollout.error)
    (rollout,) = play(ASKS, score={"command": ["python", "-c", "print('{}')"], "reward": "stdout"})
    assert rollout.reward is None and "env.harness.score.command returned an object" in str(rollout.error)


@needs_namespaces
def test_the_score_is_made_in_the_sandbox_on_a_copy(play, tmp_path):
    """It finds no network, and what it writes stays there."""
    code = "import socket, sys\nopen('said.txt', 'a').write('more')\nsocket.create_connection(('127.0.0.1', 9))"
    (rollout,) = play(ASKS, score={"command": ["python", "-c", code]})
    assert rollout.reward == 0.0 and "not supported" in rollout.columns["score_output"]
    (rollout,) = play(ASKS, score={"command": ["sleep", "60"], "timeout_s": 0.5})
    assert (rollout.reward, rollout.columns["score_status"]) == (0.0, "timeout")


def test_reward_functions_get_the_workspace_until_they_have_scored(play):
    rollouts = play(ASKS + "open('mine.txt', 'w').write('made')", score=None, n=2)
    for rollout in rollouts:
        assert rollout.reward is None and rollout.error is None
        assert (Path(rollout.columns["workspace"]) / "mine.txt").read_text() == "made"


# ---- how it may fail ----
@pytest.mark.parametrize(
    ("on_failure", "reward", "failed"), [("zero", 0.0, False), ("score", 1.0, False), ("error", None, True)]
)
def test_a_program_that_crashes(play, on_failure, reward, failed):
    (rollout,) = play(ASKS + "raise ValueError('out of order')", on_failure=on_failure)
    assert (rollout.reward, rollout.error is not None) == (reward, failed)
    assert rollout.columns["exit_status"] == 1 and "out of order" in rollout.columns["stderr"]
    assert rollout.info["program_failed"] == 1 and len(rollout.turns) == 1
    assert not failed or "out of order" in (rollout.error or "")


@pytest.mark.parametrize(
    ("on_failure", "reward"), [("score", 1.0), pytest.param("error", None, marks=pytest.mark.slow)]
)
def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(play, tmp_path, on_failure, reward):
    """Its child, too, which has a session of its own and ignores being told to end."""
    child = (
        "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    wait = f"import subprocess, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    wait += f"while not (os.path.exists({str(tmp_path / 'pid')!r})): time.sleep(0.01)\ntime.sleep(600)"
    (rollout,) = play(ASKS + wait, on_failure=on_failure, episode={"timeout_s": 4.0})
    assert rollout.reward == reward and (rollout.stop == "timeout") is (reward is not None)
    assert reward is not None or (rollout.error_kind == "timeout" and "killed after 4 s" in (rollout.error or ""))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_program_that_asks_nothing_has_failed_and_says_why(play):
    (rollout,) = play("print('no key', file=sys.stderr); sys.exit(4)")
    assert rollout.reward is None and not rollout.turns
    assert "never asked the policy" in rollout.error and "status 4" in rollout.error and "no key" in rollout.error


def test_a_spent_budget_is_refused_clearly_and_the_workspace_is_scored(play):
    code = (
        ASKS + "try:\n    [ask('again') for _ in range(9)]\n"
        "except urllib.error.HTTPError as error:\n    print(error.code, error.read().decode())"
    )
    (rollout,) = play(code, episode={"max_tokens": 30, "max_turns": 99})
    assert (rollout.reward, rollout.stop) == (1.0, "max_tokens")
    assert rollout.columns["stdout"].startswith("403") and "env.max_tokens" in rollout.columns["stdout"]
    assert sum(len(turn.completion.token_ids) for turn in rollout.turns) == 30


def test_of_what_it_prints_the_end_is_kept(play):
    (rollout,) = play(ASKS + "print('é' * 3_000_000 + 'end')", output_characters=10)
    assert rollout.reward == 1.0 and rollout.columns["stdout"] == "é" * 6 + "end\n"


def test_a_run_that_is_given_up_kills_its_programs(play, tmp_path, starter_engine, starter):
    flag = tmp_path / "pid"
    (tmp_path / "agent.py").write_text(
        f"import os, time\nopen({str(flag)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    harness = HarnessConfig(command=("python", "{folder}/agent.py"))
    config = EnvConfig(harness=harness)
    agent = load_harness(config, folder=tmp_path, scored=True)
    source = AgentRollouts(starter_engine, starter.tokenizer, agent, config, scored=True)

    async def give_up() -> None:
        params = SamplingParams(max_tokens=8)
        begun = source.begin([Prompt(id="0")], seeds=[1], n=1, params=params, version=PolicyVersion.base())
        task = asyncio.ensure_future(begun[0])
        while not (flag.exists() and flag.read_text()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(flag.read_text()), 0)
    assert isinstance(agent.function, Harness)


# ---- isolated ----
@needs_namespaces
def test_an_isolated_program_has_the_policy_and_nothing_else(play, tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    code = (
        "import socket\n" + ASKS + "found = [os.path.exists(p) for p in sys.argv[1:]]\n"
        "def reach(*where):\n"
        "    try:\n        socket.create_connection(where, timeout=2)\n        return True\n"
        "    except OSError:\n        return False\n"
        "print(json.dumps([found, reach('127.0.0.1', 22), reach('192.0.2.1', 80), os.getcwd()]))"
    )
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "agent.py").write_text(ASK + code)
    secret = str(tmp_path / "secret.txt")
    rollouts = play(
        "",
        n=2,
        command=["python", "{folder}/tools/agent.py", secret, "{workspace}/task.txt"],
        isolated=True,
        show=["tools"],
        files={"task.txt": "x"},
    )
    for rollout in rollouts:
        assert rollout.error is None, rollout.error
        assert rollout.columns["exit_status"] == 0, rollout.columns["stderr"]
        found, loopback, outside, cwd = json.loads(rollout.columns["stdout"])
        assert found == [False, True] and not loopback and not outside and cwd.endswith("/workspace")
        assert rollout.reward == 1.0 and len(rollout.turns) == 1


GREEDY_PROGRAM = """
import resource, time
kept, forked = [], 0
try:
    for _ in range(600):
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        forked += 1
except OSError:
    pass
refused = False
try:
    for _ in range(80):
        kept.append(bytearray(b"x") * (64 << 20))
except MemoryError:
    refused = True
limits = [resource.getrlimit(each)[1] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
print(json.dumps([forked, refused, *limits]))
"""


@needs_namespaces
@pytest.mark.parametrize("memory_mb", [None, 512])
def test_an_isolated_program_has_limits_of_every_kind(play, tmp_path, memory_mb):
    (tmp_path / "tools").mkdir()
    code = GREEDY_PROGRAM if memory_mb else GREEDY_PROGRAM.replace("range(80)", "range(0)")
    (tmp_path / "tools" / "agent.py").write_text(ASK + "ask('hi')\n" + code)
    (rollout,) = play(
        "",
        command=["python", "{folder}/tools/agent.py"],
        isolated=True,
        show=["tools"],
        memory_mb=memory_mb,
        episode={"timeout_s": 50.0},
        score={"command": ["true"]},
    )
    assert rollout.columns["exit_status"] == 0, rollout.columns["stderr"]
    forked, refused, files, cpu_s = json.loads(rollout.columns["stdout"])
    assert forked < ISOLATED_PROCESSES and files == ISOLATED_FILES and cpu_s == 51 and refused == bool(memory_mb)


@needs_namespaces
def test_an_isolated_program_has_a_limit_of_memory_also_where_none_is_set(play, tmp_path):
    (tmp_path / "tools").mkdir()
    code = f"""
import mmap
ask('hi')
try:
    mmap.mmap(-1, {ISOLATED_MEMORY_MB + 1} << 20, flags=mmap.MAP_PRIVATE)
    print('had')
except OSError:
    print('refused')
"""
    (tmp_path / "tools" / "agent.py").write_text(ASK + code)
    command = ["python", "{folder}/tools/agent.py"]
    (rollout,) = play("", command=command, isolated=True, show=["tools"], score={"command": ["true"]})
    assert rollout.columns["stdout"] == "refused\n"


# ---- secrets ----
def test_no_process_that_watches_a_program_has_our_environment(monkeypatch):
    monkeypatch.setenv("TRAINER_SECRET", "x")
    box = Box(trusted([sys.executable, "-c", "import time; time.sleep(60)"], env={}, limits=None, output_bytes=100))
    with box:
        box.output(timeout=60)
        assert b"TRAINER_SECRET" not in Path(f"/proc/{box.pid}/environ").read_bytes()


ALONE = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1:]
from groupwise.platform import hide_memory


def readable():
    reader = os.fork()
    if reader == 0:
        try:
            open(f"/proc/{os.getppid()}/environ").close()
        except PermissionError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(reader, 0)[1] == 0


os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a program of that user begins
before = readable()
hide_memory()
print(before, readable())
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists() or os.geteuid() != 0, reason="becomes another user")
def test_a_hidden_process_is_read_by_no_other_of_its_user():
    paths = [path for path in sys.path if path]
    done = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False"], done.stderr


# ---- mistakes that are found before a run ----
@pytest.mark.parametrize(
    ("harness", "row", "field"),
    [
        ({"command": ["no-such-program"]}, {}, "env.harness.command"),
        ({"score": {"command": ["no-such-judge"]}}, {}, "env.harness.score.command"),
        (
            {"stdin": "{task}"},
            {"question": "?"},
            "env.harness.stdin (row row 0)",
        ),
        ({"template": "repos/{name}"}, {"name": "none"}, "env.harness.template"),
        ({"files_column": "sources"}, {"question": "?"}, "env.harness.files_column"),
        ({"files_column": "sources"}, {"sources": [1]}, "env.harness.files_column"),
        ({"score": {"command": ["true"], "files_column": "t"}}, {"t": 3}, "env.harness.score.files_column"),
    ],
)
def test_what_cannot_work_is_said_first(play, harness, row, field: str):
    with raises(ConfigError, field=field):
        play("", row=row or None, **harness)


def test_a_workspace_that_nothing_scores_is_refused(tmp_path):
    with raises(ConfigError):
        load_harness(EnvConfig(harness=HarnessConfig(command=("true",))), folder=tmp_path, scored=False)


def test_files_stay_in_the_workspace(play, tmp_path):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "out").symlink_to(tmp_path)
    (rollout,) = play("", template="repo", files_column="sources", row={"sources": {"out/agent.py": "gone"}})
    assert "leads out of the workspace" in (rollout.error or "") and "def ask" in (tmp_path / "agent.py").read_text()
    with raises(EnvError):
        play("", files_column="sources", row={"sources": {"../x": ""}}, episode={"on_error": "stop"})


@pytest.mark.parametrize(
    "given",
    [
        {"harness": {"command": []}},
        {"harness": {"command": ["a"], "files": {"../a": ""}}},
        {"harness": {"command": ["a"], "show": ["/opt"]}},
        {"harness": {"command": ["a"]}, "args": {"x": 1}},
        {"harness": {"command": ["a"]}, "step_timeout_s": 3.0},
        {"harness": {"command": ["a"]}, "agent": "a:b"},
    ],
)
def test_keys_that_cannot_act_are_refused(given):
    with raises(ValidationError):
        EnvConfig.model_validate(given)


# ---- what a killed run leaves ----
PLAYS = """
import asyncio, pathlib
from groupwise.config.harness import HarnessConfig
from groupwise.tasks.harness import Harness

command = ["sh", "-c", "pwd > {folder}/there.tmp; mv {folder}/there.tmp {folder}/there; sleep 600"]
harness = Harness(HarnessConfig(command=command), pathlib.Path.cwd(), timeout_s=600, keeps=False)
asyncio.run(harness(case={}, base_url="http://127.0.0.1:9/v1", api_key="k", model="m", seed=0))
"""


@pytest.fixture
def playing(tmp_path, monkeypatch):
    """`playing("name")`: a process that plays an episode, and the workspace of that."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    started: list[subprocess.Popen] = []

    def start(name: str) -> tuple[subprocess.Popen, Path]:
        (tmp_path / name).mkdir()
        environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
        started.append(subprocess.Popen([sys.executable, "-c", PLAYS], cwd=tmp_path / name, env=environment))
        assert comes_within((tmp_path / name / "there").exists, 60.0)
        return started[-1], Path((tmp_path / name / "there").read_text().strip())

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_workspaces_of_killed_runs_are_swept_by_the_next_and_those_of_others_stay(playing, play, tmp_path):
    killed, left = playing("killed")
    _, used = playing("lives")
    killed.kill()
    killed.wait()
    foreign = tmp_path / "tmp" / "groupwise-harness-mine"
    foreign.mkdir()
    assert left.is_dir()
    play(ASKS)
    assert not left.parent.parent.exists() and used.is_dir() and foreign.is_dir()
