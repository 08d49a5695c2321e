"""tools/starter_vl.py: the starter that sees is made and measured; its lessons are what a run shows."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from groupwise.config.run import STARTER_VL
from groupwise.engine.local import LocalEngine
from groupwise.model.chat import encode_prompt
from groupwise.model.image_tokens import vision_of
from groupwise.model.load import LoadedModel, load_model
from groupwise.tasks.prompts import to_prompt
from groupwise.tasks.starter.scenes import PLACES, lessons, prompts

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import starter_vl
from starter import accuracies


def tool(*arguments: object) -> Result:
    """`python tools/starter_vl.py ARGUMENTS...`, in this process."""
    return CliRunner().invoke(starter_vl.app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder, tokenizer = tmp_path_factory.mktemp("untrained"), starter_vl.make_tokenizer()
    starter_vl.save(starter_vl.new_model(starter_vl.BuildSpec(), tokenizer), tokenizer, folder)
    return load_model(str(folder), device="cpu", dtype="float32")


def test_it_is_small(untrained: LoadedModel) -> None:
    assert sum(parameter.numel() for parameter in untrained.model.parameters()) < 5_000_000
    assert len(untrained.tokenizer.encode("red circles a1", add_special_tokens=False)) == 5  # and two spaces


def test_lessons_are_encoded_as_a_run_encodes_its_prompts(untrained: LoadedModel) -> None:
    """The picture in front of the first question, and what the assistant says marked."""
    vision, tokenizer = vision_of(untrained.model), untrained.tokenizer
    assert vision is not None
    ((_, image, turns),) = islice(lessons(1, descriptions=0.0), 1)
    ids, said = starter_vl.encode((turns,), tokenizer)
    row = {"prompt": turns[0]["content"], "image": image}
    prompt = encode_prompt(to_prompt(row, id="1"), tokenizer).token_ids
    assert vision.placeholders(prompt) == ids[0, : len(prompt)].tolist()
    assert not said[0, : len(prompt)].any()
    assert tokenizer.decode(ids[0][said[0]]) == "".join(f"{turn['content']}<|im_end|>" for turn in turns[1::2])


def test_what_the_tower_is_given_is_what_a_run_gives_it(untrained: LoadedModel) -> None:
    vision = vision_of(untrained.model)
    assert vision is not None
    row = prompts("count", n=1)[0]
    ids = encode_prompt(to_prompt(row, id="1"), untrained.tokenizer).token_ids
    seen = vision.features(next(token for token in ids if vision.picture(token) is not None)).rows
    with torch.no_grad():
        own = untrained.model.model.get_image_features(starter_vl.pixels_of((row["image"],))).pooler_output
    assert seen.shape[0] == len(PLACES) and torch.allclose(seen, own[0], atol=1e-5)


def test_the_report_of_the_model_in_the_package_is_of_that_model() -> None:
    read = json.loads(tool("info", "--json").stdout)
    assert read["base_hash"] == load_model(STARTER_VL).hash
    greedy = [row["greedy"] for row in read["skills"]]
    assert len(greedy) == len(starter_vl.MEASURED) and 0.1 < sum(greedy) / len(greedy) < 0.9  # GRPO has something to do


def test_the_model_in_the_package_reads_numbers_and_only_where_they_are() -> None:
    """Shown its picture it reads most; shown another's, it does not guess the number."""
    base, rows = load_model(STARTER_VL, device="cpu"), prompts("read", "test", n=32)
    others = [{**row, "image": other["image"]} for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]
    engine = LocalEngine(base)
    right = {
        name: accuracies(
            engine, base.tokenizer, asked, lambda row, reply: row["answer"] == reply, max_tokens=8, samples=1, seed=0
        )
        for name, asked in {"its own": rows, "another": others}.items()
    }
    engine.close()
    assert right["its own"][0] > 0.4 and right["another"][0] < 0.2, right


def test_build_does_not_write_over_a_model(untrained: LoadedModel) -> None:
    assert tool("build", "--out", untrained.name).exit_code == 2


@pytest.mark.slow
def test_build_makes_a_model_and_its_report(tmp_path: Path) -> None:
    result = tool("build", "--out", tmp_path / "new", "--steps", 2, "--questions", 1, "--json")
    assert result.exit_code == 0, result.stderr
    measured = json.loads((tmp_path / "new" / "report.json").read_text())
    assert measured == json.loads(result.stdout) and measured["base_hash"] == load_model(str(tmp_path / "new")).hash
    assert len(tool("info", tmp_path / "new").stdout.splitlines()) == 1 + len(measured["skills"])
