"""`groupwise env check` in this process: environments of both contracts, good ones and every kind of bad one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from groupwise.cli.envs import envs_app
from wording import wording

ROOT = Path(__file__).parent.parent.parent
MINE = '''
import random
import threading
import time

from groupwise.tasks.env import Observation, StepResult
from groupwise.tasks.tool_env import ToolEnv

def say(text):
    return [{"role": "user", "content": text}]


class Guess:
    """Up to three guesses, of which the right one is worth 1."""

    def __init__(self, highest=9):
        self.highest = highest

    def cases(self):
        return [{"secret": number} for number in range(4)]

    def eval_cases(self):
        return [{"secret": number} for number in range(4, 6)]

    def reset(self, case, seed):
        self.secret, self.left = case["secret"], 3
        return f"Guess a number up to {self.highest}."

    def step(self, message):
        print("environments may print")
        self.left -= 1
        if message["content"] == str(self.secret):
            return StepResult(done=True, reward=1.0)
        return StepResult(messages=say("No."), done=not self.left)

    def score(self, episode):
        return 0.0


class Async(Guess):
    async def reset(self, case, seed):
        return super().reset(case, seed)

    async def step(self, message):
        return super().step(message)


class Slots:
    __slots__ = ("turn",)

    def cases(self):
        return [{}]

    def reset(self, case, seed):
        return "Hello."

    def step(self, message):
        return None

    def score(self, episode):
        return 0.25


class RaisesInReset(Guess):
    def reset(self, case, seed):
        raise KeyError("city")


class RaisesInStep(Guess):
    def step(self, message):
        return StepResult(done=True, reward=1 / len(message["content"]))


class RaisesInScore(Guess):
    def score(self, episode):
        raise RuntimeError("no judge")


class RaisesInClose(Guess):
    def close(self):
        raise RuntimeError("still open")


class RaisesWhenMade(Guess):
    def __init__(self):
        raise OSError("no database")


class Hangs(Guess):
    def step(self, message):
        threading.Event().wait()


class HangsInCases(Guess):
    def cases(self):
        threading.Event().wait()


class NoCases(Guess):
    cases = None


class EmptyCases(Guess):
    def cases(self):
        return []


class OddRole(Guess):
    def step(self, message):
        return [{"role": "oracle", "content": "No."}]


class NotANumber(Guess):
    def score(self, episode):
        return float("nan")


class Huge(Guess):
    def step(self, message):
        return "x" * 1_000_000


class Chance(Guess):
    def reset(self, case, seed):
        super().reset(case, seed)
        return f"Guess a number, hint {random.random()}."


class Seeded(Guess):
    def reset(self, case, seed):
        super().reset(case, seed)
        return f"Guess a number, hint {random.Random(seed).random()}."


class Shared(Guess):
    """Counts its turns for all episodes together."""

    rooms = {"left": 0}

    def reset(self, case, seed):
        self.rooms["left"] = 3
        return super().reset(case, seed)

    def step(self, message):
        self.rooms["left"] -= 1
        time.sleep(0.01)
        return StepResult(messages=say(f"{self.rooms['left']} left."), done=self.rooms["left"] <= 0)


class Changes(Guess):
    def cases(self):
        return [{"secret": 1, "rooms": ["a", "b"]}]

    def reset(self, case, seed):
        case["rooms"].append("c")
        return super().reset(case, seed)


class NeverDone(Guess):
    def step(self, message):
        return "Go on."


class Constant(Guess):
    def step(self, message):
        return None

    def score(self, episode):
        return 1.0


class Farm(Guess):
    """Pays for every turn."""

    def step(self, message):
        self.left -= 1
        return StepResult(messages=say("More."), reward=0.2, done=not self.left)


class Silence(Guess):
    """Who says something is punished."""

    def step(self, message):
        return StepResult(done=True, reward=-0.1 * bool(message["content"]))


class Polite(Guess):
    """Pays those who agree."""

    def step(self, message):
        return StepResult(done=True, reward=0.8 * (message["content"] == "Yes."))


class Overlap(Guess):
    eval_cases = Guess.cases


class Shop(ToolEnv):
    def cases(self):
        return [{"item": "tea"}]

    def first_message(self, case, seed):
        return "How much is the tea? Call look."

    def look(self, item: str, count: int = 1) -> str:
        """The price of an item."""
        return "4" if item == "tea" else str(count)

    tools = (look,)

    def score(self, episode):
        return float(episode.answer == "4")


class BadTools(Guess):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "array"}}}

    def reset(self, case, seed):
        return Observation(messages=say("Hello."), tools=[self.tool])

    def step(self, message):
        return None


class Hotel:
    """Three methods."""

    def build_dataset(self, tokenizer):
        return [{"prompt": [{"role": "user", "content": f"City {i}?"}], "case_idx": i} for i in range(3)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        more = model.chat([{"role": "user", "content": f"Sure about {case_idx}?"}])
        return 0.5 * bool(completion[0]["content"]) * bool(more)


class HotelRaises(Hotel):
    def score_episode(self, model, tokenizer, completion, case_idx):
        raise ValueError("no rooms")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("envs")
    (folder / "mine_envs.py").write_text(MINE)
    return folder


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(envs_app, ["check", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def check(folder: Path):
    """`check("Guess", "--episodes", 2)`: exit code and JSON; only canned replies unless episodes are asked for."""

    def checked(name: str, *options: object) -> tuple[int, dict]:
        model = () if "--episodes" in options or "--model" in options else ("--no-model",)
        result = run(f"mine_envs:{name}", "--folder", folder, "--json", *model, *options)
        return result.exit_code, json.loads(result.stdout)

    return checked


def found(answer: dict, severity: str | None = None) -> dict[str, str]:
    """check -> message."""
    chosen = [each for each in answer["findings"] if severity in (None, each["severity"])]
    return {each["check"]: each["message"] for each in chosen}


# ---- good ones ----


@pytest.mark.parametrize("name", ["Guess", "Async"])
def test_an_environment_that_is_fit(check, name):
    code, answer = check(name)
    assert (code, answer["cases"], answer["tools"]) == (0, 4, [])
    warnings = found(answer, "warning")
    assert found(answer, "error") == {} and set(warnings) == {"constant"}
    wording(warnings["constant"])
    silent = answer["policies"][0]
    assert silent["policy"] == "nothing" and silent["stops"] == {"done": 3} and silent["turns"] == 3.0
    methods = {row["method"]: row for row in answer["methods"]}
    assert {"__init__", "cases", "reset", "step", "score"} <= set(methods)
    assert all(row["failed"] == row["hung"] == 0 for row in methods.values())
    assert not {"the same call", "an unknown tool"} & {row["policy"] for row in answer["policies"]}


def test_the_arguments_are_the_environments(check):
    _, answer = check("Guess", "--args", '{"highest": 77}', "--set", "max_turns=2")
    assert "up to 77." in answer["episode"]["segments"][0][0]["text"]
    assert answer["policies"][0]["stops"] == {"max_turns": 3}


def test_given_cases_need_no_prompt(check, tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"secret": 3}\n')
    _, answer = check("Guess", "--data", tmp_path / "cases.jsonl")
    assert answer["cases"] == 1 and answer["verdict"] != "error"


def test_what_refuses_to_be_watched_is_played_all_the_same(check):
    code, answer = check("Slots")
    assert code == 0 and answer["policies"][0]["mean"] == 0.25
    assert [row["method"] for row in answer["methods"]] == ["__init__"]


def test_the_example_with_a_model_and_its_tools():
    """The model plays with the real engine, and one of its episodes is shown, as the learner gets it."""
    result = run("calculator:Calculator", "--folder", ROOT / "examples/envs", "--json", "--episodes", 6)
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["tools"]) == (0, ["calculator"])
    rows = {row["policy"]: row for row in answer["policies"]}
    assert rows["the model"]["episodes"] == 6 and rows["the model"]["turns"] > 1
    assert rows["the same call"]["stops"] == {"max_turns": 3} and rows["each tool once"]["turns"] == 2.0
    [runs] = answer["episode"]["segments"]
    assert [each["trained"] for each in runs] == [False, True] * (len(runs) // 2) and len(runs) >= 4
    assert runs[0]["text"].endswith("<|im_start|>assistant\n") and "<tool_response>" in runs[2]["text"]
    assert runs[1]["text"].endswith("<|im_end|>") and "tool_response" not in runs[1]["text"]
    assert len(answer["episode"]["turn_rewards"]) == len(runs) // 2


def test_the_text_says_what_is_trained(folder):
    result = run("mine_envs:Shop", "--folder", folder, "--no-model")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Shop: ") and "1 cases, tools look" in lines[0]
    [head] = [line for line in lines if line.startswith("policy")]
    assert head.split() == ["policy", "episodes", "turns", "least", "mean", "most", "ended", "by"]
    episode = lines[next(i for i, line in enumerate(lines) if line.startswith("One episode, of ")) :]
    kinds = [line.split()[0] for line in episode if line.startswith(("seen ", "trained "))]
    assert kinds[:4] == ["seen", "trained", "seen", "trained"]
    assert "\x1b" not in result.stdout and "environments may print" not in result.stdout


def test_three_methods(check):
    code, answer = check("Hotel", "--episodes", 2)
    assert code == 0 and found(answer, "error") == {}
    rows = {row["policy"]: row for row in answer["policies"]}
    assert rows["the same words"]["mean"] == 0.5 and rows["nothing"]["mean"] == 0.0
    assert rows["the model"]["episodes"] == 2 and rows["the same words"]["turns"] == 2.0
    assert {"build_dataset", "score_episode"} <= {row["method"] for row in answer["methods"]}
    assert len(answer["episode"]["segments"]) == 2  # another conversation: nothing is shared but the reward


# ---- bad ones ----


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RaisesInReset", "exception"),
        ("RaisesInStep", "exception"),
        ("RaisesInScore", "exception"),
        ("RaisesInClose", "exception"),
        ("RaisesWhenMade", "cases"),
        ("OddRole", "contract"),
        ("NotANumber", "contract"),
        ("Huge", "contract"),
        ("NoCases", "cases"),
        ("EmptyCases", "cases"),
        ("Chance", "determinism"),
        ("Shared", "shared state"),
        ("Changes", "case"),
        ("BadTools", "tool"),
        ("HotelRaises", "exception"),
    ],
)
def test_an_environment_with_an_error(check, name, kind):
    code, answer = check(name)
    assert (code, answer["verdict"]) == (1, "error")
    said = found(answer, "error")[kind]
    wording(said.partition(":")[0] if name in ("Chance", "Shared") else said)  # what differs there is chance


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Constant", "constant"),
        ("Constant", "hack"),
        ("Farm", "hack"),
        ("Silence", "hack"),
        ("Polite", "hack"),
        ("Overlap", "cases"),
    ],
)
def test_an_environment_that_teaches_something_else(check, name, kind):
    code, answer = check(name)
    assert (code, answer["verdict"]) == (0, "warning")
    messages = [
        each["message"] for each in answer["findings"] if (each["severity"], each["check"]) == ("warning", kind)
    ]
    assert messages
    for message in messages:
        wording(message)


def test_what_is_never_done_is_told(check):
    """A warning where the model played as well; canned replies seldom bring anything to its end."""
    _, answer = check("NeverDone")
    wording(found(answer, "note")["limits"])
    _, answer = check("NeverDone", "--episodes", 2, "--max-tokens", 16, "--set", "max_turns=2")
    assert "limits" in found(answer, "warning")


def test_who_is_paid_is_named(check):
    _, answer = check("Polite")
    assert [each["probe"] for each in answer["findings"] if each["check"] == "hack"] == ["the same words"]
    _, answer = check("Polite", "--best", "5")
    assert not [each for each in answer["findings"] if each["check"] == "hack"]


def test_another_seed_may_change_an_episode(check):
    code, answer = check("Seeded")
    assert code == 0
    wording(found(answer, "note")["seed"].partition(":")[0])


def test_what_hangs_costs_its_time_and_no_more(check):
    began = time.monotonic()
    code, answer = check("Hangs", "--deadline", 0.2)
    said = [each["message"] for each in answer["findings"] if each["check"] == "time"]
    assert code == 1 and any("Hangs.step" in each and "0.2 s" in each for each in said)
    wording(next(each for each in said if "0.2 s" not in each))
    assert {row["method"]: row["hung"] for row in answer["methods"]}["step"] == 3
    code, answer = check("HangsInCases", "--deadline", 0.2)
    assert code == 1 and found(answer) == {"cases": "HangsInCases.cases took longer than 0.2 s"}
    assert time.monotonic() - began < 30


# ---- the command line ----


@pytest.mark.parametrize(
    "arguments",
    [
        ("mine_envs:say",),
        ("mine_envs:Guess", "--args", "{"),
        ("mine_envs:Guess", "--args", '{"top": 1}'),
        ("mine_envs:Guess", "--set", "max_turn=3"),
        ("mine_envs:Nothing",),
    ],
)
def test_what_is_no_environment_is_a_mistake_of_the_command_line(folder, arguments):
    result = run(*arguments, "--folder", folder, "--no-model")
    assert result.exit_code == 2
    wording(result.stderr)


# ---- harnesses and agents, which a run's file names ----
PROGRAM = """
import json, os, sys, urllib.request

body = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))
open("said.txt", "w").write(json.load(answer)["choices"][0]["message"]["content"])
"""
AGENT = """
async def agent(case, *, client, model):
    answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": case["question"]}])
    return float(answer.choices[0].message.content == "Yes.")
"""
RUN = """
model: starter
env: %s
data: {source: rows.jsonl, shuffle: false}
rollout: {prompts_per_step: 2, group_size: 3, max_tokens: 8}
"""
HARNESS = """
  timeout_s: 60
  harness:
    command: [python, "{folder}/program.py", "{question}"]
    score: {command: [grep, -q, Yes, said.txt]}
"""
TOML = """
data = {source = "rows.jsonl", shuffle = false}
rollout = {prompts_per_step = 2, group_size = 3, max_tokens = 8}

[env]
timeout_s = 60
harness.command = ["python", "{folder}/program.py", "{question}"]
harness.score.command = ["grep", "-q", "Yes", "said.txt"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "harness.yaml").write_text(RUN % HARNESS)
    (tmp_path / "harness.toml").write_text(TOML)
    (tmp_path / "agent.yaml").write_text(RUN % "{agent: my_agent:agent}")
    (tmp_path / "none.yaml").write_text(RUN % "null" + "rewards: [groupwise.rewards.text:exact_match]")
    rows = [{"question": f"Is {n} even?", "answer": "Yes."} for n in (2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("name", ["harness.yaml", "harness.toml", "agent.yaml"])
def test_what_plays_whole_episodes_is_played(project, name):
    result = run(project / name, "--no-model", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    rows = {row["policy"]: row for row in answer["policies"]}
    assert answer["cases"] == 2 and rows["the same words"]["mean"] == 1.0 and rows["nothing"]["mean"] == 0.0
    assert all(row["turns"] == 1.0 and set(row["stops"]) == {"done"} for row in rows.values())
    wording(found(answer, "warning")["hack"])
    assert "Is 2 even?" in answer["episode"]["segments"][0][0]["text"]


def test_what_is_played_is_rendered_as_the_files_chat_says(project):
    """Without the template's own words, a prompt is the message alone."""
    written = (project / "harness.yaml").read_text()
    (project / "chatted.yaml").write_text(written + "chat: {template: \"{{ messages[-1]['content'] }}\"}\n")
    result = run(project / "chatted.yaml", "--no-model", "--json")
    first = json.loads(result.stdout)["episode"]["segments"][0][0]["text"]
    assert result.exit_code == 0 and first == "Is 2 even?", result.output


def test_the_model_plays_a_harness_and_keys_may_be_changed(project):
    result = run(
        project / "harness.yaml", "--json", "--episodes", 3, "--set", "harness.score.command=[grep,No,said.txt]"
    )
    rows = {row["policy"]: row for row in json.loads(result.stdout)["policies"]}
    assert rows["the model"]["episodes"] == 3 and rows["the same words"]["mean"] == 0.0


def test_a_program_that_fails_is_an_error_with_its_output(project):
    (project / "program.py").write_text("raise SystemExit('no such option')")
    result = run(project / "harness.yaml", "--no-model", "--json")
    said = found(json.loads(result.stdout))["contract"]
    assert result.exit_code == 1 and "no such option" in said
    wording(said)


@pytest.mark.parametrize(
    "arguments",
    [
        ("none.yaml",),
        ("harness.yaml", "--args", "{}"),
        ("harness.yaml", "--folder", "."),
        ("harness.yaml", "--deadline", "3"),
        ("harness.yaml", "--set", "harness.command=[python,'{nothing}']"),
        ("gone.yaml",),
    ],
)
def test_a_file_that_cannot_be_checked_is_a_mistake_of_the_command_line(project, arguments):
    result = run(project / arguments[0], *arguments[1:], "--no-model")
    assert result.exit_code == 2, result.output
    wording(result.stderr)
