"""The web interface in a browser, against a real server and its worker: what is seen, taught, undone and survived.

    pytest -m slow tests/slow/test_ui.py     two minutes; needs Chromium and `pip install playwright`

Runs on disk are in test_ui_runs.py, what the pages compute in ui/test/ (`npm test`).
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crash.place import Place, a_place
from groupwise.model.load import load_model
from serving import running
from whole_server import whole

from .chromium import CHROMIUM, SIDEWAYS, expect, serious
from .marked import archive, save_marked
from .place import pid_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>{{7*7}}\u202e"
SUM = "What is 47 + 38? Think step by step."
PAGES = {
    "now": "starter",
    "jobs": "Jobs",
    "rollouts": "Rollouts",
    "learn": "Learn",
    "teach": "Teach",
    "play": "Playground",
    "adapters": "Adapters",
}
JOB_S = 60_000
RATE = 3e-3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place")) as place:
        place.start()
        place.await_ready()
        yield place


def go(page: Any, place: Place, where: str) -> None:
    page.goto(f"{place.url}/ui/#/{where}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def api(place: Place, path: str) -> Any:
    return httpx2.get(place.url + path, timeout=30).json()


def sample(place: Place, prompt: str, n: int, **options: Any) -> list[str]:
    body = {"prompts": [[{"role": "user", "content": prompt}]], "n": n, "max_tokens": 24, **options}
    answer = httpx2.post(place.url + "/v1/completions/batch", json=body, timeout=60).json()
    return [each["rollout_id"] for each in answer["completions"]]


def submit(place: Place, name: str, **config: Any) -> str:
    groups = [{"completions": [{"rollout_id": id, "reward": i} for i, id in enumerate(sample(place, SUM, 8))]}]
    body = {"groups": groups, "config": {"output_name": name, "learning_rate": RATE, **config}}
    answer = httpx2.post(place.url + "/v1/train/grpo", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["job_id"]


def await_end(place: Place, job: str) -> str:
    place.until(lambda: api(place, f"/v1/train/status/{job}")["finished_at"], f"job {job} does not end")
    return api(place, f"/v1/train/status/{job}")["state"]


# ---- the pages ----
def test_it_is_there_at_once(browser: Any, page: Any, place: Place) -> None:
    took_ms = []
    for _ in range(3):  # each with nothing in its cache; the machine may be busy with something else
        context = browser.new_context()
        cold = context.new_page()
        cold.goto(f"{place.url}/ui/")
        cold.get_by_role("heading", name="starter").wait_for()
        paints = cold.evaluate("performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)")
        took_ms += paints  # since the page was asked for
        context.close()
    assert len(took_ms) == 3 and min(took_ms) < 1000
    page.goto(place.url + "/")
    assert page.url.startswith(f"{place.url}/ui/")


@pytest.mark.parametrize("name", PAGES)
def test_each_page_shows_what_it_is_for(page: Any, place: Place, name: str) -> None:
    go(page, place, name)
    expect(page.get_by_role("heading", level=1)).to_have_text(PAGES[name])
    expect(page.get_by_role("navigation", name="Pages").get_by_role("link", name=name.title()[:4])).to_have_attribute(
        "aria-current", "page"
    )
    expect(page.get_by_text("live", exact=True)).to_be_visible()


# ---- teaching ----
def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def test_the_default_lesson_makes_more_of_what_was_not_taught_right(page: Any, place: Place) -> None:
    """Three rounds of the first example, nothing changed but the name, and a reload with the scores unsent."""
    go(page, place, "teach")
    page.get_by_role("button", name=re.compile("^Sums")).click()
    button(page, "Sample").click()
    train = button(page, "Train")
    expect(train).to_be_enabled(timeout=JOB_S)
    page.get_by_label("Adapter").fill("lesson")
    page.locator("[data-card]").first.focus()
    page.keyboard.press("x")
    expect(page.get_by_text("63 of 64 completions scored")).to_be_visible()
    page.reload()
    expect(page.get_by_text("63 of 64 completions scored")).to_be_visible()
    expect(page.get_by_label("Adapter")).to_have_value("lesson")
    result = page.get_by_role("region", name="Before and after")
    for round_ in range(3):
        expect(train).to_be_enabled(timeout=JOB_S)
        train.click()
        expect(result).to_be_visible(timeout=JOB_S)
        assert api(place, "/v1/adapters")["active_version"] == f"lesson@{round_ + 1}"
        if round_ < 2:
            page.get_by_role("button", name=f"Next round, from lesson@{round_ + 1}").click()
    rows = page.get_by_role("region", name="Rounds").locator("tbody tr").all()
    cells = [row.locator("td").all_inner_texts() for row in rows]
    assert [each[1:3] for each in cells] == [["base", "lesson@1"], ["lesson@1", "lesson@2"], ["lesson@2", "lesson@3"]]
    shares = [float(part) for part in re.findall(r"[0-9.]+", " ".join(each[4] for each in cells))]
    assert shares[-1] >= shares[0] + 15  # percent of 64 completions of prompts that were not trained on
    assert max(float(each[5]) for each in cells) < 0.5  # KL from the base model, nats a token
    page.set_viewport_size({"width": 390, "height": 780})
    assert page.evaluate(SIDEWAYS) == []
    page.set_viewport_size({"width": 1280, "height": 900})
    button(page, "New lesson").click()
    assert api(place, "/v1/adapters/lesson")["history"][1]["parent"] == "lesson@1"


def test_another_versions_completions_are_not_trained_on(page: Any, place: Place) -> None:
    go(page, place, "teach")
    page.get_by_label("Prompt 1", exact=True).fill(SUM)
    page.get_by_label("Start from").select_option("lesson@1")
    button(page, "Sample").click()
    cards = page.locator("[data-card]")
    expect(cards).to_have_count(8, timeout=20_000)
    button(page, "Thumbs").click()
    cards.first.focus()
    for key in "ynyn":
        page.keyboard.press(key)
    expect(page.get_by_text("4 of 8 completions scored")).to_be_visible()
    form = page.get_by_role("form", name="Train")
    expect(form).to_contain_text("4 scored, 4 not")
    expect(page.locator("[data-card][aria-current]")).to_have_count(1)  # the next without a score stands out, no other
    cards.nth(1).focus()
    page.keyboard.press("u")
    expect(cards.nth(4)).to_be_focused()
    expect(cards.nth(4)).to_have_attribute("aria-current", "step")
    page.set_viewport_size({"width": 390, "height": 780})
    expect(button(page, "Train")).to_be_in_viewport()
    cards.first.scroll_into_view_if_needed()
    expect(button(page, "Train")).to_be_in_viewport()
    expect(page.get_by_label("Learning rate")).to_be_hidden()
    button(page, "Settings").click()
    expect(page.get_by_label("Learning rate")).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 900})
    expect(button(page, "Train")).to_be_enabled()
    page.get_by_label("Start from").select_option("base")
    expect(page.get_by_text("sampled by lesson@1, and training starts from base")).to_be_visible()
    expect(button(page, "Train")).to_be_disabled()
    button(page, "Start from lesson@1").click()
    expect(button(page, "Train")).to_be_enabled()


def test_the_better_of_two_and_a_pattern_score_too(page: Any, place: Place) -> None:
    go(page, place, "teach")
    page.get_by_label("Prompt 1", exact=True).fill(SUM)
    page.get_by_label("Start from").select_option("base")
    button(page, "Sample").click()
    expect(page.locator("[data-card]")).to_have_count(8, timeout=20_000)
    button(page, "A or B").click()
    page.get_by_role("group", name="Which is better?").focus()
    for key in ("a", "b", "=", "a"):
        page.keyboard.press(key)
    made = page.get_by_role("status").filter(has_text=re.compile("^[0-9]+ compared$"))
    assert int(made.inner_text().split()[0]) >= 4
    expect(page.get_by_text(re.compile("^0 of 8"))).to_have_count(0)
    button(page, "Answer").click()
    page.get_by_label("Right is").select_option("pattern")
    page.get_by_label("Regular expression").fill("85(")
    expect(page.get_by_text("Invalid regular expression")).to_be_visible()
    page.get_by_label("Regular expression").fill("[0-9]")
    expect(page.get_by_text("8 of 8 completions scored")).to_be_visible()


# ---- talking ----
def test_a_chat_keeps_its_history_is_edited_answered_again_and_compared(page: Any, place: Place) -> None:
    asked: list[Any] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    go(page, place, "play")
    first = page.get_by_role("region", name="Chat 1")
    first.get_by_label("Version 1").select_option("lesson@1")
    message = page.get_by_label("Message", exact=True)
    for turn, text in enumerate(("What is 2 + 3?", "And 4 + 4?")):
        message.fill(text)
        message.press("Enter")
        expect(first.get_by_role("button", name="Answer again")).to_be_visible(timeout=20_000)
        assert [each["role"] for each in asked[-1]["messages"]] == ["user", "assistant"] * turn + ["user"]
    expect(first.get_by_role("listitem").get_by_text("lesson@1", exact=True)).to_have_count(2)
    first.get_by_role("button", name="Answer again").click()
    expect(first.get_by_role("button", name="Answer again")).to_be_visible(timeout=20_000)
    assert len(asked[-1]["messages"]) == 3 and asked[-1]["messages"][2]["content"] == "And 4 + 4?"
    first.get_by_role("button", name="Edit").first.click()
    first.get_by_label("Edit message").fill("What is 1 + 1?")
    first.get_by_role("button", name="Send again").click()
    expect(first.get_by_role("button", name="Answer again")).to_be_visible(timeout=20_000)
    assert [each["content"] for each in asked[-1]["messages"]] == ["What is 1 + 1?"]
    page.get_by_role("button", name="Compare with another").click()
    message.fill("Hello?")
    message.press("Enter")
    expect(page.get_by_role("button", name="Answer again")).to_have_count(2, timeout=20_000)
    page.reload()
    expect(first.get_by_text("Hello?")).to_be_visible()


def test_an_answer_is_rated_and_corrected_and_what_becomes_of_it_is_seen(page: Any, place: Place) -> None:
    go(page, place, "play")
    page.get_by_role("textbox", name="Message").fill("What is 4 + 5?")
    button(page, "Send").click()
    button(page, "Bad").click()
    expect(page.get_by_text("Kept", exact=True)).to_be_visible()
    button(page, "Correct").click()
    page.get_by_role("textbox", name="What it should have said").fill("9")
    button(page, "Keep correction").click()
    expect(page.get_by_text("Correction kept")).to_be_visible()
    kept = api(place, "/v1/feedback?limit=2")["feedback"]
    assert [(each["score"], each["correction"]) for each in kept] == [(None, "9"), (0.0, None)]
    assert kept[0]["rollout_id"].startswith("chatcmpl-")
    go(page, place, "now")
    expect(page.get_by_role("region", name="From feedback")).to_contain_text("2 ratings wait")
    go(page, place, "learn")
    feedback = page.get_by_role("region", name="Feedback")
    expect(feedback.get_by_role("row", name=re.compile("^no name given")).get_by_role("cell")).to_have_text(
        ["no name given", "2", "0", "0", "0", "2", "0"]
    )
    expect(feedback.get_by_role("listitem")).to_have_count(2)
    expect(feedback).to_contain_text("should have said: 9")
    feedback.get_by_role("button", name="did not count").click()
    expect(feedback.get_by_role("listitem")).to_have_text(["None of them."])
    (id,) = sample(place, "What is 6 + 1?", 1)
    go(page, place, f"rollouts?id={id}")
    button(page, "Good").click()
    expect(page.get_by_text("Kept", exact=True)).to_be_visible()
    assert api(place, f"/v1/feedback?rollout_id={id}")["feedback"][0]["score"] == 1.0


def test_several_versions_answer_beside_each_other(page: Any, place: Place) -> None:
    go(page, place, "play/compare")
    page.get_by_label("Prompt").fill(SUM)
    page.get_by_label("Samples").fill("2")
    page.get_by_role("button", name="Ask", exact=True).click()
    columns = page.get_by_role("region", name=re.compile("Column"))
    expect(columns).to_have_count(2)
    for column, version in zip(columns.all(), ("base", "lesson@3"), strict=True):
        expect(column.get_by_text(f"answered by {version}")).to_be_visible(timeout=20_000)
        expect(column.locator("article")).to_have_count(2)
    columns.first.locator("pre[role=group]").first.focus()
    page.keyboard.press("ArrowRight")
    expect(columns.first.get_by_text(re.compile("logprob -?[0-9]")).first).to_be_visible()


# ---- jobs ----
def test_a_job_is_followed_and_cancelled(page: Any, place: Place) -> None:
    go(page, place, "jobs")
    job = submit(place, "long", iterations=2000, auto_load=False)
    row = page.get_by_role("row", name=re.compile(job[:8]))
    expect(row.get_by_text("running")).to_be_visible(timeout=JOB_S)
    row.get_by_role("link").click()
    expect(page.get_by_role("img", name=re.compile("^Loss"))).to_be_visible(timeout=30_000)
    page.get_by_role("button", name="Cancel the job of long").click()
    expect(page.get_by_text(re.compile("What it has trained, .* will be lost"))).to_be_visible()
    page.get_by_role("link", name="Jobs", exact=True).first.click()  # it can be taken back on every page
    button(page, "Undo").click()
    page.wait_for_timeout(6_000)  # longer than the click would have waited
    assert api(place, f"/v1/train/status/{job}")["cancel_requested"] is False
    row.get_by_role("button", name="Cancel the job of long").click()
    expect(row.get_by_role("button", name="Cancel the job of long")).to_be_disabled()
    row.get_by_role("link").click()
    expect(page.get_by_text("cancelled").first).to_be_visible(timeout=JOB_S)
    assert await_end(place, job) == "cancelled"
    expect(page.get_by_role("button", name="Run again")).to_be_visible()
    config = page.get_by_role("region", name="Configuration, a table")
    expect(page.get_by_text("Changed from the default.")).to_be_visible()
    keys = config.get_by_role("row").locator("td:first-child").all_inner_texts()
    assert keys == ["auto_load", "iterations", "learning_rate", "output_name"]
    page.get_by_role("button", name=re.compile("^All [0-9]+ keys")).click()
    expect(config.get_by_role("row", name="weight_decay 0")).to_be_visible()
    commands = page.get_by_role("group", name="Commands to copy")
    commands.get_by_role("button", name="Copy the command: Show").click()
    expect(commands.get_by_role("status").filter(has_text=re.compile("copied|select"))).to_be_visible()
    expect(commands.locator("code")).to_have_text(f"groupwise train status {job} --url {place.url}")


def test_a_job_that_never_ran_has_no_duration(page: Any, place: Place) -> None:
    first = submit(place, "ahead", iterations=2000, auto_load=False)
    place.until(lambda: api(place, f"/v1/train/status/{first}")["started_at"], f"job {first} does not start")
    waits = submit(place, "ahead")  # of one adapter, which are trained one after another
    go(page, place, "jobs")
    heads = page.get_by_role("columnheader").all_inner_texts()
    row = page.get_by_role("row", name=re.compile(waits[:8]))
    row.get_by_role("button", name="Cancel the job of ahead").click()
    page.reload()  # whoever leaves does not take it back
    expect(row.get_by_text("cancelled")).to_be_visible(timeout=30_000)
    cells = dict(zip(heads, row.get_by_role("cell").all_inner_texts(), strict=True))
    assert cells["Started"] == cells["Duration"] == "–" and cells["Queued"] != "–"
    httpx2.post(f"{place.url}/v1/train/cancel/{first}")
    await_end(place, first)
    ran = dict(
        zip(
            heads,
            page.get_by_role("row", name=re.compile(first[:8])).get_by_role("cell").all_inner_texts(),
            strict=True,
        )
    )
    assert ran["Started"] != "–" and ran["Duration"] != "–"


def test_learning_says_what_it_is_of(page: Any, place: Place) -> None:
    """Every group that was posted, those of equal rewards too; and a job's after is the next round."""
    jobs = []
    for better in (0, 4):
        ids = [sample(place, SUM, 8) for _ in range(3)]
        rewards = [[0.0] * (4 - better) + [1.0] * (4 + better), [0.0, 1.0] * 4, [1.0] * 8]
        groups = [
            {"completions": [{"rollout_id": id, "reward": reward} for id, reward in zip(*each, strict=True)]}
            for each in zip(ids, rewards, strict=True)
        ]
        body = {"groups": groups, "config": {"output_name": "rounds", "learning_rate": 1e-4, "kl_coeff": 0}}
        jobs.append(httpx2.post(place.url + "/v1/train/grpo", json=body, timeout=60).json()["job_id"])
        assert await_end(place, jobs[-1]) == "completed"
    go(page, place, "now")
    expect(page.get_by_role("img", name=re.compile(r"^Mean reward of rounds. reward: 0.833"))).to_be_visible()
    expect(
        page.get_by_text(re.compile(r"every reward that was posted, groups of equal rewards included \(3 of 6\)"))
    ).to_be_visible()
    go(page, place, f"jobs/{jobs[0]}")
    outcome = page.get_by_role("region", name="Outcome")
    expect(outcome).to_contain_text(
        re.compile("0.667.*posted with this job.*0.833.*posted in the next round", re.DOTALL)
    )


def test_jobs_are_compared(page: Any, place: Place) -> None:
    jobs = [submit(place, "one", iterations=2), submit(place, "two", iterations=3)]
    assert [await_end(place, job) for job in jobs] == ["completed", "completed"]
    go(page, place, "jobs")
    for job in jobs:
        page.get_by_label(f"Compare {job[:8]}").check()
    page.get_by_role("button", name="Compare 2").click()
    differing = page.get_by_role("row", name=re.compile("^iterations"))
    expect(differing).to_contain_text("2")
    expect(differing).to_contain_text("3")
    expect(page.get_by_role("img", name=re.compile("^KL to the reference(, measured)?[.]"))).to_be_visible()


# ---- rollouts ----
def test_a_hundred_rollouts_and_the_group_of_one(page: Any, place: Place) -> None:
    job = submit(place, "read")
    go(page, place, f"rollouts?job={job}")
    rows = page.get_by_role("listbox").get_by_role("option")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("× 8")
    button(page, "A row a prompt").click()
    expect(rows).to_have_count(8)
    rows.nth(1).click()
    group = page.get_by_role("region", name="Group")
    expect(group.get_by_role("listitem")).to_have_count(8)
    rewards = [float(text) for text in group.locator("li b").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    group.get_by_label("Colour by").select_option("ratio")
    group.locator("pre[role=group]").first.focus()
    page.keyboard.press("ArrowRight")
    expect(group.get_by_text(re.compile("^ratio [0-9]")).first).to_be_visible(timeout=10_000)
    page.get_by_label("Reward from").fill("6")
    expect(rows).to_have_count(2)
    assert await_end(place, job) == "completed"


def test_a_long_list_is_only_drawn_where_it_is_seen(page: Any, place: Place) -> None:
    sample(place, SUM, 100, seed=1)
    go(page, place, "rollouts")
    expect(page.get_by_role("status").filter(has_text="rollouts")).to_be_visible()
    drawn = page.locator("[role=listbox] [role=option]")
    expect(drawn.nth(6)).to_be_attached()  # "0 rollouts so far" comes before the first page of them
    assert 5 < drawn.count() < 60
    page.get_by_role("listbox").focus()
    page.keyboard.press("End")
    expect(drawn.last).to_have_attribute("aria-selected", "true")
    assert drawn.count() < 60


def test_rollouts_are_narrowed_and_one_prompt_is_followed_across_versions(page: Any, place: Place) -> None:
    for version in ("base", "lesson@1"):
        sample(place, SUM, 2, adapter=version, seed=9)
    go(page, place, "rollouts")
    rows = page.get_by_role("listbox", name="Rollouts").get_by_role("option")
    page.get_by_label("Contains").fill("WHAT IS 47 + 38")
    expect(rows.first).to_be_visible()
    page.get_by_label("Sampled by").select_option("lesson@1")
    expect(page).to_have_url(re.compile("version=lesson"))
    with page.expect_response(re.compile("sort=longest")):  # until then the rows are those of the order before
        page.get_by_label("Order").select_option("longest")
    rows.first.click()
    button(page, "This prompt everywhere").click()
    shown = page.get_by_role("button", name=re.compile(r"^(base|lesson@1): [0-9]"))
    expect(shown).to_have_count(2)
    go(page, place, "rollouts")
    expect(rows.first).to_be_visible()
    sample(place, "Only just now?", 1)
    expect(rows.filter(has_text="Only just now?")).to_be_visible(timeout=10_000)


def test_back_on_a_phone_closes_what_was_opened(browser: Any, place: Place) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    go(page, place, "rollouts")
    rows = page.get_by_role("listbox", name="Rollouts").get_by_role("option")
    rows.first.tap()
    expect(page.get_by_role("region", name="Group")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="Group")).to_have_count(0)
    expect(rows.first).to_be_visible()
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Adapters").tap()
    page.get_by_role("button", name=re.compile("^lesson@1")).tap()
    expect(page.get_by_role("region", name="Version lesson@1")).to_be_in_viewport()
    page.go_back()
    expect(page.get_by_role("button", name=re.compile("^lesson@1"))).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Rollouts")
    context.close()


def test_on_a_phone_nothing_lies_beside_the_view(browser: Any, place: Place) -> None:
    """Of every page, with what the tests before left: neither the page nor a table in it scrolls sideways."""
    job = submit(place, "narrow")
    sample(place, "A_word_without_an_end" * 20, 2)
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    for where in (*PAGES, "play/compare", "adapters?by=name", "adapters?version=lesson@1", f"jobs/{job}"):
        go(page, place, where)
        page.wait_for_timeout(500)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, where
        assert page.evaluate(SIDEWAYS) == [], where
    go(page, place, "now")
    requests = page.get_by_role("region", name="Latest requests, a table")
    expect(requests.get_by_role("row").first).to_contain_text(re.compile("A_word.*stop|A_word.*length"))
    go(page, place, "jobs")
    expect(page.get_by_role("region", name="Jobs, a table").get_by_role("link").first).to_be_visible()
    go(page, place, "rollouts")
    page.get_by_role("listbox").get_by_role("option").first.tap()
    expect(page.get_by_role("region", name="Group").get_by_role("listitem").first).to_be_visible()
    assert page.evaluate(SIDEWAYS) == []
    context.close()


def test_a_model_that_reads_text_is_shown_no_picture(page: Any, place: Place) -> None:
    go(page, place, "play")
    message = page.get_by_role("textbox", name="Message")
    expect(message).to_be_visible()
    message.evaluate(
        """node => {
          const files = new DataTransfer();
          files.items.add(new File(["x"], "dots.png", { type: "image/png" }));
          node.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData: files }));
        }"""
    )
    expect(page.get_by_role("alert")).to_contain_text("starter reads text alone")
    expect(page.get_by_role("button", name="Add pictures")).to_have_count(0)


def test_the_palette_goes_anywhere_by_typing_and_says_the_keys(page: Any, place: Place) -> None:
    go(page, place, "now")
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Command").fill("vers lesson@2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Version lesson@2")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("t")
    expect(page.get_by_role("heading", level=1)).to_have_text("Teach")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog").get_by_role("heading", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


# ---- adapters ----
def test_upload_activate_roll_back_and_delete(page: Any, place: Place, tmp_path: Path) -> None:
    made = save_marked(load_model("starter"), "Q", tmp_path / "made", prompts=["2 + 3 = ?"], tokens=8)
    packed = tmp_path / "made.tar.gz"
    packed.write_bytes(archive(made))
    before = api(place, "/v1/adapters")["active_version"]
    go(page, place, "adapters")
    page.get_by_role("button", name="Upload").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("base")
    dialog.get_by_label("Archive").set_input_files(packed)
    dialog.get_by_role("button", name="Upload").click()
    expect(dialog.get_by_role("alert")).to_contain_text("base")
    dialog.get_by_label("Name").fill("mine")
    dialog.get_by_role("button", name="Upload").click()
    version = page.get_by_role("region", name="Version mine@1")
    version.get_by_role("button", name="Activate").click()
    expect(version.get_by_role("button", name="Active")).to_be_disabled()
    assert api(place, "/v1/adapters")["active_version"] == "mine@1"
    page.get_by_role("button", name="Roll back").click()
    expect(version.get_by_role("button", name="Activate")).to_be_enabled()
    assert api(place, "/v1/adapters")["active_version"] == before
    version.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name=re.compile("^mine@1"))).to_have_count(0)
    assert "mine" not in [each["name"] for each in api(place, "/v1/adapters")["available"]]


def test_a_note_is_kept_and_found(page: Any, place: Place) -> None:
    go(page, place, "adapters?version=lesson@2")
    version = page.get_by_role("region", name="Version lesson@2")
    version.get_by_label("Note").fill("good at sums, weak at carries")
    version.get_by_role("button", name="Keep note").click()
    row = page.get_by_role("button", name=re.compile("^lesson@2.*weak at carries"))
    expect(row).to_be_visible()
    expect(version.get_by_role("button", name="Keep note")).to_be_disabled()
    page.reload()
    expect(version.get_by_label("Note")).to_have_value("good at sums, weak at carries")
    page.get_by_label("Search versions").fill("carries reward>0")
    rows = page.get_by_role("group", name="Versions, a list").get_by_role("button", name=re.compile("@"))
    expect(rows).to_have_count(1)
    expect(page.get_by_text(re.compile("^1 of [0-9]+ versions"))).to_be_visible()
    assert api(place, "/v1/adapters/lesson@2")["history"][0]["note"] == "good at sums, weak at carries"


def test_a_version_is_downloaded(page: Any, place: Place, tmp_path: Path) -> None:
    go(page, place, "adapters?version=lesson@1")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    assert saved.value.suggested_filename == "lesson@1.tar.gz"
    saved.value.save_as(tmp_path / "x.tar.gz")
    assert (tmp_path / "x.tar.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_adapters_are_merged(page: Any, place: Place) -> None:
    go(page, place, "adapters")
    page.get_by_role("button", name="Merge").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("combobox", name=re.compile("^Source 1")).select_option("lesson@1")
    dialog.get_by_role("combobox", name=re.compile("^Source 2")).select_option("one@1")
    for weight, value in zip(dialog.get_by_role("spinbutton").all(), ("0.75", "0.25"), strict=True):
        weight.fill(value)
    dialog.get_by_role("button", name="Add a source").click()
    dialog.get_by_role("combobox", name=re.compile("^Source 3")).select_option("two@1")
    dialog.get_by_role("button", name="Remove source 3").click()
    dialog.get_by_label("New adapter's name").fill("base")
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("base")
    dialog.get_by_label("New adapter's name").fill("both")
    dialog.get_by_role("button", name="Merge", exact=True).click()
    expect(page.get_by_role("region", name="Version both@1")).to_be_visible(timeout=30_000)
    note = json.loads((place.state / "adapters" / "both" / "v000001" / "merge.json").read_text(encoding="utf-8"))
    parts = [("lesson@1", 0.75), ("one@1", 0.25)]
    assert note["sources"] == [{"version": version, "weight": weight} for version, weight in parts]
    assert note["mode"] == "weighted_average" and "both" in [
        each["name"] for each in api(place, "/v1/adapters")["available"]
    ]


def test_what_changed_is_marked_word_by_word(page: Any, place: Place) -> None:
    sums = [f"What is {a} + {b}? Think step by step." for a in (47, 12, 123, 85, 159) for b in (38, 7, 58, 167, 76)]
    body = {"prompts": [[{"role": "user", "content": each}] for each in sums], "n": 1, "temperature": 0}
    answers = {}
    for version in ("base", "lesson@3"):
        asked = {**body, "max_tokens": 96, "adapter": version}
        answer = httpx2.post(place.url + "/v1/completions/batch", json=asked, timeout=60).json()
        answers[version] = [each["text"] for each in answer["completions"]]
    differ = [i for i in range(len(sums)) if answers["base"][i] != answers["lesson@3"][i]]
    chosen = [*differ[:1], *(i for i in range(len(sums)) if i not in differ)][:2]  # what a lesson changes varies
    prompts = [sums[i] for i in chosen]
    said = {version: [texts[i] for i in chosen] for version, texts in answers.items()}
    go(page, place, "adapters?version=lesson@3")
    page.get_by_label("Prompts, one a line").fill("\n".join(prompts))
    page.get_by_role("combobox", name=re.compile("^From")).select_option("base")
    page.get_by_role("combobox", name=re.compile("^To")).select_option("lesson@3")
    page.get_by_role("button", name="Compare").click()
    shown = page.locator("article:has(pre)")
    expect(shown).to_have_count(2, timeout=30_000)
    for i, article in enumerate(shown.all()):
        for version, other in (("base", "ins"), ("lesson@3", "del")):
            kept = "pre => [...pre.childNodes].filter(n => n.nodeName !== %r).map(n => n.textContent).join('')"
            assert article.locator("pre").evaluate(kept % other.upper()) == said[version][i]
    assert said["base"] != said["lesson@3"] and page.locator("article ins").count() > 0
    assert page.locator("article", has_text="· the same").count() == sum(map(str.__eq__, *said.values()))


# ---- the key ----
def test_a_key_is_typed_in_once(browser: Any, model_dir: Path, tmp_path: Path) -> None:
    with whole(tmp_path, model_dir, api_key="sk-planted", served_model_name="tiny") as site, running(site.app) as port:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/ui/#/adapters")
        for key in ("sk-wrong", "sk-planted"):
            expect(page.get_by_role("heading", name="This server has a key")).to_be_visible()
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Open").click()
        expect(page.get_by_role("heading", name="Adapters")).to_be_visible()
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        page.reload()
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        assert "sk-" not in page.content() and "sk-" not in page.url
        context.close()


# ---- what must not happen ----
def test_hostile_text_stays_text(page: Any, place: Place) -> None:
    httpx2.put(f"{place.url}/v1/adapters/lesson@1/notes", json={"note": HOSTILE}, timeout=30)
    chat = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 4}
    httpx2.post(place.url + "/v1/chat/completions", json=chat, timeout=30)
    sample(place, HOSTILE, 2)  # the newest, which is listed first
    go(page, place, "now")
    expect(page.get_by_text("onerror=").first).to_be_visible()
    go(page, place, "rollouts")
    expect(page.get_by_text("onerror=").first).to_be_visible()
    page.get_by_role("listbox").get_by_role("option").first.click()
    expect(page.get_by_role("region", name="Group").get_by_role("listitem")).to_have_count(2)
    go(page, place, "teach")
    page.get_by_label("Prompt 1", exact=True).fill(HOSTILE)
    button(page, "Sample").click()
    button(page, "Thumbs").click()
    expect(page.get_by_role("button", name="Remove group")).to_be_visible(timeout=20_000)
    go(page, place, "adapters?version=lesson@1")
    expect(page.get_by_label("Note")).to_have_value(HOSTILE)
    go(page, place, "play")
    page.get_by_label("Message", exact=True).fill(HOSTILE)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.get_by_role("region", name="Chat 1").get_by_text("onerror=")).to_be_visible()
    go(page, place, "<img src=x onerror=window.hit=1>")
    expect(page.get_by_text("There is no page")).to_be_visible()
    assert page.locator("img:not([src='./favicon.svg'])").count() == 0 and page.evaluate("window.hit") is None


def test_it_comes_back_when_the_server_does(page: Any, place: Place) -> None:
    go(page, place, "now")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    place.stop()
    expect(page.get_by_text("No connection to the server")).to_be_visible(timeout=20_000)
    place.start()
    place.await_ready()
    expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=20_000)
    expect(page.get_by_text("No connection to the server")).to_have_count(0)


def test_a_server_that_stands_still_is_seen_to_within_ten_seconds(page: Any, place: Place) -> None:
    go(page, place, "now")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    page.wait_for_timeout(9_000)  # nothing happens, and signs of life come all the same
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    os.kill(pid_of(place), signal.SIGSTOP)
    try:
        expect(page.get_by_text(re.compile(r"No word from the server\sfor [0-9]+ s"))).to_be_visible(timeout=10_000)
        assert page.get_by_text("stale", exact=True).count() == 2 and page.get_by_text("ok", exact=True).count() == 0
    finally:
        os.kill(pid_of(place), signal.SIGCONT)
    expect(page.get_by_text("live", exact=True)).to_be_visible(timeout=20_000)
    expect(page.get_by_text("No word from the server")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious(browser: Any, place: Place, scheme: str, width: int) -> None:
    job, other = (each["job_id"] for each in api(place, "/v1/train/status?limit=2"))
    pages = [
        *PAGES,
        f"jobs/compare?ids={job},{other}",
        "play/compare",
        "adapters?by=name",
        f"jobs/{job}",
        f"rollouts?job={job}&id={job}.0.0",
        "adapters?version=lesson@1",
    ]
    assert serious(browser, place.url, pages, scheme=scheme, width=width) == []


LEARN = "learn={adapter: sums, after: 2, max_tokens: 8, config: {learning_rate: 1.0e-3}}"
GATE = (
    "gate={prompts: {source: 'groupwise.tasks.starter.tasks:prompts', args: {n: 16}}, max_tokens: 8, margin: 1.0, "
    "rewards: ['groupwise.rewards.text:exact_match'], scoring: {workers: 0}, canary: 10%}"
)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server whose job from feedback is on trial."""
    with a_place(tmp_path_factory.mktemp("learner"), settings=[LEARN, GATE]) as place:
        place.start()
        place.await_ready()
        for id, score in zip(sample(place, SUM, 2), (0.0, 1.0), strict=True):
            body = {"rollout_id": id, "score": score}
            assert httpx2.post(place.url + "/v1/feedback", json=body, timeout=60).status_code == 200
        place.until(lambda: api(place, "/v1/learn")["trial"], "no version is on trial")
        yield place


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious_where_a_version_is_on_trial(
    browser: Any, learner: Place, scheme: str, width: int
) -> None:
    assert serious(browser, learner.url, ["now", "learn"], scheme=scheme, width=width) == []


def test_a_trial_is_shown_and_ended_by_hand(browser: Any, learner: Place) -> None:
    page = browser.new_page()
    go(page, learner, "learn")
    goes_on = page.get_by_role("region", name="What goes on")
    most = api(learner, "/v1/learn")["trial_most"]
    expect(goes_on).to_contain_text(f"{most} more ratings of its answers end it at the latest")
    expect(goes_on.get_by_role("progressbar", name=f"0 of {most}")).to_be_visible()
    made = page.get_by_role("region", name="Decisions").get_by_role("listitem")
    expect(made).to_have_count(1)
    expect(made).to_contain_text("gate, against base")
    expect(made).to_contain_text("16 held-out prompts, which are enough")
    expect(made).to_contain_text("surely not below")
    expect(page.get_by_role("region", name="Feedback").get_by_role("listitem")).to_have_count(2)
    go(page, learner, "now")
    expect(page.get_by_role("status").filter(has_text="Next")).to_contain_text("sums@1 is on trial")
    panel = page.get_by_role("region", name="From feedback")
    expect(panel.get_by_text("is on trial: it answers 10% of the requests")).to_be_visible(timeout=20_000)
    panel.get_by_role("button", name="Promote", exact=True).click()
    expect(panel.get_by_text("sums@1 is active: by hand")).to_be_visible(timeout=20_000)
    panel.get_by_role("link", name="Every decision and rating").click()
    expect(made).to_have_count(2)
    expect(made.first).to_contain_text("went live")
    expect(made.first).to_contain_text("by hand")
    assert api(learner, "/v1/learn")["active"] == "sums@1"
    page.close()
