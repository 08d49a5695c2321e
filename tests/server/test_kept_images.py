"""The images of a run on disk, in its groups, its episodes, its evaluations and by their addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from groupwise.config.serve import ServeConfig
from groupwise.model.image_tokens import FIRST, PLACES, key_of
from groupwise.pictures import Picture, read_picture
from groupwise.run.evaluate import Evaluation, save_evaluations
from groupwise.server.run_app import build_run_app
from groupwise.server.run_files import open_runs
from groupwise.types import Message, PolicyVersion, Prompt, Rollout, RolloutGroup
from run_place import ASKED, make_run, scored, turn
from seeing_models import drawn

TOKENS = 4  # of an image


def ids_of(*pictures: Picture) -> tuple[int, ...]:
    """A prompt that begins with these images."""
    firsts = [FIRST + key_of(each.digest) * PLACES for each in pictures]
    return (*(first + place for first in firsts for place in range(TOKENS)), *ASKED)


def asked(*pictures: Picture, id: str = "p:1", rollouts: tuple[Rollout, ...] = (scored("4", 1.0),)) -> RolloutGroup:
    parts = [{"type": "image", "image": each} for each in pictures]
    messages = (Message(role="user", content=[*parts, {"type": "text", "text": "2+2?"}]),)
    return RolloutGroup(prompt=Prompt(id=id, messages=messages, token_ids=ids_of(*pictures)), rollouts=rollouts)


def site(*directories: Path) -> TestClient:
    return TestClient(build_run_app(open_runs(directories), ServeConfig()), base_url="http://localhost")


def get(http: TestClient, path: str) -> Any:
    answer = http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def kept(tmp_path: Path) -> list[Picture]:
    return [read_picture(drawn(8, 6, seed=seed)).keep(tmp_path / "a run" / "images") for seed in (1, 2)]


def test_a_group_names_the_images_of_its_prompt_and_has_them(tmp_path: Path, kept: list[Picture]) -> None:
    gone = read_picture(drawn(8, 6, seed=3))
    groups = [asked(kept[1], gone, kept[0]), asked(id="p:2")]
    http = site(make_run(tmp_path / "a run", rollouts={1: groups}))
    group = get(http, "/v1/runs/a run/rollouts/1.0.0")
    assert group["prompt"].startswith("[image][image][image]<|im_start|>user\n2+2?")
    first, missing, last = group["images"]
    assert missing is None
    for where, picture in ((first, kept[1]), (last, kept[0])):
        shown = http.get(where)
        assert shown.content == picture.data and shown.headers["content-type"] == "image/png"
    assert "images" not in get(http, "/v1/runs/a run/rollouts/1.1.0")
    assert len(get(http, "/v1/runs/a run/rollouts")["rows"]) == 2


def test_a_turn_of_an_episode_has_the_images_that_it_was_shown(tmp_path: Path, kept: list[Picture]) -> None:
    first = turn("left", prompt=ids_of(kept[0]))
    told = ids_of(kept[1])[:TOKENS]
    second = turn("right", prompt=[*first.prompt_ids, *first.completion.token_ids, *told])
    messages = [
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": [{"type": "image", "image": kept[1]}, {"type": "text", "text": "and now?"}]},
        {"role": "assistant", "content": "right"},
    ]
    for name, said in (("told", messages), ("bare", [])):
        episode = Rollout(turns=(first, second), messages=tuple(said), stop="done", reward=1.0)
        (run := make_run(tmp_path / name, rollouts={1: [asked(kept[0], rollouts=(episode,))]}))
        kept[1].keep(run / "images")
        (shown,) = get(site(run), f"/v1/runs/{name}/rollouts/1.0.0")["rollouts"]
        images = [part.get("images") for part in shown["parts"]]
        assert images == ([None, [f"/v1/runs/told/images/{kept[1].digest}"], None] if said else [None, None, None])
        assert "".join(shown["tokens"]).count("[image]") == 1


def test_an_evaluation_names_the_images_of_its_prompts(tmp_path: Path, kept: list[Picture]) -> None:
    run = make_run(tmp_path / "a run")
    for step in (0, 3):
        group = replace(asked(kept[0]), rollouts=(scored(f"{step}", step / 3),))
        evaluation = Evaluation(mode="greedy", version=PolicyVersion.base(), groups=(group,))
        save_evaluations(run, step, {"greedy": evaluation})
    (changed,) = get(site(run), "/v1/runs/a run/evaluations")["changed"]
    assert changed["images"] == [f"/v1/runs/a%20run/images/{kept[0].digest}"]


@pytest.mark.parametrize("digest", ["0" * 64, "..%2Fconfig.yaml", "0", "A" * 64])
def test_nothing_else_of_a_run_is_shown(tmp_path: Path, kept: list[Picture], digest: str) -> None:
    answer = site(make_run(tmp_path / "a run")).get(f"/v1/runs/a run/images/{digest}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] in ("image_not_found", "route_not_found")
