"""The core lives without any bridge, and a package of one's own is found as the bridges are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forked import ONE_SERVER, ran
from groupwise import bridges
from groupwise.extensions import extension

INSIDE = Path(bridges.__file__).parent.iterdir()
FOLDERS = sorted(path.stem for path in INSIDE if not path.stem.startswith("__") and path.suffix in ("", ".py"))
BLOCK = """
import sys, warnings


class Gone:
    def find_spec(self, name, path=None, target=None):
        if any(name == gone or name.startswith(gone + ".") for gone in GONE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Gone())
warnings.simplefilter("ignore")
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=300)


@ONE_SERVER
def test_the_core_trains_without_any_bridge(tmp_path: Path):
    """One step of the starter, evaluated, with no bridge to import; what the fork server imported before has none."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n{"prompt": "3 + 4", "answer": "7"}\n')
    (tmp_path / "run.yaml").write_text(
        "data: {source: prompts.jsonl}\nrewards: [groupwise.rewards.math:number_match]\nrun_dir: out\n"
        "rollout: {prompts_per_step: 2, group_size: 2, max_tokens: 4}\ntrain: {steps: 1}\nscoring: {workers: 0}\n"
    )
    program = f"GONE = ('groupwise.bridges',)\n{BLOCK}from groupwise.run.loop import run_loop\n"
    program += "from groupwise.run.config_file import load_config\n"
    program += "print(run_loop(load_config('run.yaml')).steps)\n"
    program += "print([name for name in sys.modules if name.startswith('groupwise.bridges')])\n"
    (tmp_path / "without_bridges.py").write_text(program)
    done = ran("without_bridges", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["1", "[]"]


def test_each_bridge_can_go_and_the_others_stay(tmp_path: Path):
    """Without one of them, whatever does not build on it is still found."""
    needs = {"trl": {"unsloth"}, "trainer_args": {"axolotl", "trl", "unsloth", "prime-rl", "aitraining"}}
    program = "import json\nfrom groupwise.extensions import extension, extensions\n"
    program += "groups = ('groupwise.config_formats', 'groupwise.environments', 'groupwise.environment_contracts')\n"
    program += "found = {}\n"
    program += f"for one in {FOLDERS!r}:\n"
    program += "    GONE[:] = [f'groupwise.bridges.{one}']\n    extension.cache_clear()\n"
    program += "    for name in [name for name in sys.modules if name.startswith('groupwise.bridges')]:\n"
    program += "        del sys.modules[name]\n"
    program += "    found[one] = [list(extensions(group)) for group in groups]\n"
    program += "print(json.dumps(found))\n"
    done = run(f"GONE = []\n{BLOCK}{program}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for gone, (formats, *_) in json.loads(done.stdout.splitlines()[-1]).items():
        lost = {gone.replace("_", "-")} | needs.get(gone, set())
        assert set(formats) == {"axolotl", "aitraining", "prime-rl", "trl", "unsloth"} - lost, gone


PACKAGE = """
from pathlib import Path

from groupwise.config.formats.format import ConfigFormat
from groupwise.config.formats.translation import Translation
from groupwise.config.formats.tables import keys_of
from groupwise.tasks.env import StepResult

KEYS = Path(__file__).with_name("keys.yaml")


def translate(document, *, folder, count):
    t = Translation(document, system="Tiny", keys=keys_of(KEYS))
    t.put("rewards", [t["judge"]], "judge")
    return t


FORMAT = ConfigFormat(name="Tiny", recognises=lambda data: "tiny" in data, table=KEYS, translate=translate)


class Guess:
    named_by = "number"

    def __init__(self, number):
        self.number = number

    def cases(self):
        return [{"secret": self.number}]

    def reset(self, case, seed):
        return "Which number?"

    def step(self, message):
        return StepResult(reward=float(self.number in message["content"]), done=True)
"""
KEYS = """
- {idle: tiny, because: it names the format}
- {plain: prompts, kind: text, here: data.source}
- {plain: rounds, kind: integer, here: train.steps, default: 3}
- {made: judge, kind: text, here: rewards, what: the one reward}
"""
POINTS = """
[groupwise.config_formats]
tiny = tiny_bridge:FORMAT
broken = no_such_module:FORMAT

[groupwise.environments]
guess = tiny_bridge:Guess
"""


def test_a_package_adds_a_format_and_an_environment(tmp_path: Path):
    """An installed package, as pip leaves it: its format is read, its environment is played by its name; one whose
    module is missing is said, and stops nothing."""
    (tmp_path / "tiny_bridge.py").write_text(PACKAGE)
    (tmp_path / "keys.yaml").write_text(KEYS)
    info = tmp_path / "tiny_bridge-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-bridge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "t.yaml").write_text("tiny: 1\nprompts: p.jsonl\njudge: groupwise.rewards.math:number_match\n")
    program = "import warnings\nfrom groupwise.config.run import EnvConfig\n"
    program += (
        "from groupwise.run.config_file import read_run\nfrom groupwise.tasks.load_env_kind import load_env_kind\n"
    )
    program += "from pathlib import Path\n"
    program += "with warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
    program += "    loaded = read_run('t.yaml', ['rounds=5'])\n"
    program += "print(loaded.system, loaded.runnable().train.steps, loaded.config.data.source, len(said))\n"
    program += "kind = load_env_kind(EnvConfig(environment='guess:7'), folder=Path(), model='starter', scored=False)\n"
    program += "print(kind.name, kind.cases()[0].columns)\n"
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["Tiny 5 p.jsonl 1", "7 {'secret': '7'}"]


def test_a_module_that_is_missing_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch):
    from importlib.metadata import EntryPoint

    point = EntryPoint("gone", "no_such_module:FORMAT", "groupwise.nothing")
    monkeypatch.setattr("groupwise.extensions._points", lambda group: (point,))
    with pytest.warns(UserWarning, match="no_such_module"):
        assert extension.__wrapped__("groupwise.nothing", "gone") is None
    assert extension("groupwise.nothing", "other") is None
