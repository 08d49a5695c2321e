"""The gate and the canary: which versions go live, what becomes of those that do not, and what a restart changes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.learn import GateConfig, ShadowConfig
from groupwise.errors import ConfigError, DataError, EngineError
from groupwise.server.gate import BEST, COUNTS, LOOKS, START, TRIAL
from groupwise.server.policies import Trial
from groupwise.store.ledger import Job
from groupwise.tasks.starter.tasks import prompts as arithmetic
from groupwise.types import PolicyVersion
from whole_server import Whole, whole
from wording import raises, wording

GATE: dict[str, Any] = {
    "prompts": {
        "source": "groupwise.tasks.starter.tasks:prompts",
        "args": {"skill": ["add"], "style": "bare", "n": 24},
    },
    "rewards": ["groupwise.rewards.text:exact_match"],
    "max_tokens": 8,
    "margin": 0.3,  # 24 prompts tell no less
    "scoring": {"workers": 0},
}


# ---- the canary ----


def config(**fields: Any) -> GateConfig:
    return GateConfig(prompts={"source": "x.jsonl"}, rewards=["m:f"], **fields)  # pyright: ignore[reportArgumentType]


def test_a_share_is_a_number_or_a_percentage_alone_and_beside_options() -> None:
    assert [config(canary=each).canary.share for each in (0.1, "10%", {"share": "10%", "ratings": 5})] == [0.1] * 3  # pyright: ignore[reportOptionalMemberAccess]
    with raises(ValueError):
        config(canary={"share": "a tenth"})


def test_a_session_keeps_its_answerer_and_the_share_is_kept() -> None:
    trial = Trial(version=PolicyVersion("a", 2), against=PolicyVersion("a", 1), share=0.1, since=0.0)
    taken = [trial.takes(f"user-{i}") for i in range(5000)]
    assert taken == [trial.takes(f"user-{i}") for i in range(5000)] and 400 <= sum(taken) <= 600
    other = Trial(version=PolicyVersion("a", 3), against=PolicyVersion("a", 1), share=0.1, since=0.0)
    assert taken != [other.takes(f"user-{i}") for i in range(5000)], "not the same users bear every trial"


# ---- a server with a gate ----


def train(server: Whole, *, learning_rate: float, steps: int = 1) -> Job:
    """A job on one group, as a worker and the supervisor do it."""
    body = {"prompts": [[{"role": "user", "content": "What is 4 + 5? Reply with just the number."}]], "n": 4}
    sampled = server.http.post("/v1/completions/batch", json={**body, "max_tokens": 8, "seed": 1}).json()["completions"]
    scored = [{"rollout_id": each["rollout_id"], "reward": float(i)} for i, each in enumerate(sampled)]
    options = {"output_name": "sums", "learning_rate": learning_rate, "iterations": steps}
    posted = server.http.post("/v1/train/grpo", json={"groups": [{"completions": scored}], "config": options})
    assert posted.status_code == 200, posted.text
    server.train()
    return finish(server)


def poison(server: Whole, *, base: str | None = None) -> Job:
    """A healthy job that teaches one wrong answer to every sum."""
    asked = [f"What is {a} + {b}? Reply with just the number." for a in range(20, 24) for b in range(40, 44)]
    return imitate(server, dict.fromkeys(asked, "7"), learning_rate=1e-2, epochs=4, base=base)


def imitate(
    server: Whole, answers: dict[str, str], *, learning_rate: float, epochs: int = 1, base: str | None = None
) -> Job:
    """A job that trains on these answers."""
    examples = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in answers.items()
    ]
    options: dict[str, Any] = {"output_name": "sums", "learning_rate": learning_rate, "epochs": epochs}
    options |= {} if base is None else {"base_adapter": base}
    posted = server.http.post("/v1/train/sft", json={"examples": examples, "config": options})
    assert posted.status_code == 200, posted.text
    server.train()
    return finish(server)


def finish(server: Whole) -> Job:
    assert server.http.portal is not None
    server.http.portal.call(server.server.supervisor._finish_owners)
    return server.server.ledger.jobs()[0]


def shown(server: Whole) -> dict[str, Any]:
    return server.http.get("/v1/learn").json()


def kinds(server: Whole) -> list[str]:
    return [each["kind"] for each in shown(server)["transitions"]][::-1]


def chat(server: Whole, session: str = "", **options: Any) -> tuple[str, str]:
    body = {"messages": [{"role": "user", "content": "What is 4 + 5?"}], "max_tokens": 2, **options}
    headers = {"x-session-id": session} if session else {}
    answer = server.http.post("/v1/chat/completions", json=body, headers=headers).json()
    return answer["id"], answer["system_fingerprint"]


def look(server: Whole) -> str:
    assert server.http.portal is not None and server.server.gate is not None
    return server.http.portal.call(server.server.gate.look)


def test_a_version_that_is_as_good_goes_live_and_a_ruined_one_does_not(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), gate={**GATE, "max_kl": 1.0}) as server:
        same = train(server, learning_rate=0.0)
        assert (same.state, same.unhealthy, shown(server)["active"]) == ("completed", None, "sums@1")
        ruined = poison(server)
        assert ruined.state == "completed" and str(ruined.unhealthy).startswith("the gate refused it")
        assert shown(server)["active"] == "sums@1" and kinds(server) == ["gate_passed", "gate_refused"]
        data = shown(server)["transitions"][0]["data"]
        assert data["version"] == "sums@2" and data["reward"] < data["reward_active"]
        status = server.http.get(f"/v1/train/status/{ruined.id}").json()
        assert "sums@2 is stored and was not made active, as the gate refused it" in status["warnings"][-1]
        assert "health is error" not in status["warnings"][-1]
        store = server.server.store
        assert store.newest("sums") == PolicyVersion("sums", 1) and "held-out" in str(
            store.unhealthy(PolicyVersion("sums", 2))
        )
        listed = {str(info.version): info.unhealthy for info in store.list()}
        assert listed["sums@1"] is None and "the gate refused it" in str(listed["sums@2"])
        metrics = server.http.get("/metrics").text
        assert 'groupwise_learn_transitions{kind="gate_refused"} 1.0' in metrics
        assert server.http.post("/v1/adapters/sums/activate", json={"version": 2}).status_code == 200, "by hand"


@pytest.mark.long
def test_every_look_at_the_prompts_needs_more_and_worn_out_ones_are_told_of_once(tmp_path: Path) -> None:
    gate = {**GATE, "margin": 0.2}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert train(server, learning_rate=0.0).unhealthy is None
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert server.http.portal is not None
        server.http.portal.call(server.server.policies.start)
        assert train(server, learning_rate=0.0).unhealthy is None
        assert kinds(server) == ["gate_passed", "prompts_worn", "gate_passed"]
        third = train(server, learning_rate=0.0)
        assert "look 3 at these prompts" in str(third.unhealthy) and kinds(server)[3:] == ["gate_refused"]
        looks = [each["data"]["look"] for each in shown(server)["transitions"][::-1]]
        assert looks == [1, 3, 2, 3] and list(server.server.feedback.setting(LOOKS).values()) == [3]
        worn = shown(server)["transitions"][2]
        assert "gate.prompts: with 24 held-out prompts" in worn["message"] and worn["data"]["set"] == "prompts"
        assert server.server.feedback.setting(START)["version"] == "base"
    with whole(tmp_path / "state", Path("starter"), gate={**GATE, "samples": 2}) as server:
        assert server.http.portal is not None
        server.http.portal.call(server.server.policies.start)
        train(server, learning_rate=0.0)
        assert shown(server)["transitions"][0]["data"]["look"] == 4, "the same prompts, however they are answered"
        start = server.server.feedback.setting(START)
        assert (start["version"], start["length"]) == ("base", pytest.approx(start["length"])) and start["length"] > 0


def test_what_passed_on_the_prompts_has_to_pass_on_those_that_confirm(tmp_path: Path) -> None:
    source = {**GATE["prompts"], "args": {**GATE["prompts"]["args"], "split": "test"}}
    gate = {**LENIENT, "confirm": source}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert train(server, learning_rate=0.0).unhealthy is None
        data = shown(server)["transitions"][0]["data"]
        assert (data["prompts"], data["confirm_prompts"], data["look"], data["confirm_look"]) == (24, 24, 1, 1)
        assert data["error"] == pytest.approx(0.05) and data["confirm_error"] < 0.05 / 2
    with raises(ConfigError, field="gate.confirm"):
        whole(tmp_path / "other", Path("starter"), gate={**GATE, "confirm": GATE["prompts"]}).__enter__()


@pytest.mark.long
def test_what_a_version_says_to_prompts_that_were_rated_has_bounds_of_its_own(tmp_path: Path) -> None:
    """Rated prompts are answered otherwise than before, and held-out ones as before."""
    learn = {"adapter": "sums", "after": 4, "max_tokens": 8, "scoring": {"workers": 0}}
    learn["config"] = {"learning_rate": 3e-3, "iterations": 6}
    gate = {**GATE, "margin": 0.9, "max_length_ratio": None, "max_length_ratio_total": None}
    for bound, unhealthy in ((1e-3, True), (50.0, False)):
        with whole(tmp_path / str(bound), Path("starter"), learn=learn, gate={**gate, "max_kl_rated": bound}) as server:
            for a in (2, 3):
                asked = [{"role": "user", "content": f"What is {a} + 11? Reply with just the number."}]
                body = {"prompts": [asked], "n": 2, "max_tokens": 8, "seed": a}
                rated = server.http.post("/v1/completions/batch", json=body).json()["completions"]
                for each, thumb in zip(rated, ("up", "down"), strict=True):
                    server.http.post("/v1/feedback", json={"rollout_id": each["rollout_id"], "thumb": thumb})
            assert server.http.portal is not None and server.server.trainer is not None
            server.http.portal.call(server.server.trainer.step)
            server.train()
            job = finish(server)
            assert ("gate.max_kl_rated is 0.001" in str(job.unhealthy)) is unhealthy
            data = next(each["data"] for each in shown(server)["transitions"] if each["kind"].startswith("gate_"))
            assert data["kl_rated"] > 1e-3 and data["length_ratio_rated"] > 0


@pytest.mark.slow
def test_losses_within_the_margin_do_not_add_up(tmp_path: Path) -> None:
    """Three versions: one that knows the held-out sums, the base as it is, one that knows none. Each is worse than the
    one before by less than the margin."""
    gate = {**GATE, "temperature": 0.0, "margin": 0.85, "max_length_ratio": None}
    right = {str(row["prompt"]): str(row["answer"]) for row in arithmetic(["add"], style="bare", n=24)}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert imitate(server, right, learning_rate=3e-3, epochs=12).unhealthy is None
        assert imitate(server, right, learning_rate=0.0, base="base").unhealthy is None
        assert shown(server)["active"] == "sums@2"
        first, second = (each["data"] for each in shown(server)["transitions"][::-1])
        assert first["reward"] > second["reward"] + 0.1, "the test needs a better version"
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert server.http.portal is not None
        server.http.portal.call(server.server.policies.start)
        ruined = poison(server, base="base")
        data = shown(server)["transitions"][0]["data"]
        assert data["lower_bound"] >= -0.85 > data["lower_bound_best"] and data["reward_best"] == first["reward"]
        assert "sums@1, the best that went live" in str(ruined.unhealthy) and shown(server)["active"] == "sums@2"
        server.http.post("/v1/adapters/sums/activate", json={"version": 3})
        assert imitate(server, right, learning_rate=0.0, base="sums@3").unhealthy is None, "the best is what was chosen"


@pytest.mark.long
def test_a_canary_answers_its_share_and_is_rolled_back_if_it_is_rated_worse(tmp_path: Path) -> None:
    gate = {**GATE, "canary": {"share": 0.5, "margin": 0.5}}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        job = train(server, learning_rate=0.0)
        assert job.state == "completed" and shown(server)["active"] == "base"
        assert (shown(server)["trial"], shown(server)["trial_share"]) == ("sums@1", 0.5)
        deleted = server.http.delete("/v1/adapters/sums@1")
        assert deleted.status_code == 409
        wording(deleted.json()["error"])
        answers = {user: chat(server, user) for user in map(str, range(40))}
        assert {version for _, version in answers.values()} == {"base", "sums@1"}
        assert all(chat(server, user)[1] == version for user, (_, version) in answers.items()), "by session"
        assert {chat(server, user="ann")[1] for _ in range(24)} == {"base", "sums@1"}, "no person has one answerer"
        assert chat(server, adapter="base")[1] == "base" and chat(server, model="sums@1")[1] == "sums@1"
        for id, version in answers.values():
            server.http.post("/v1/feedback", json={"rollout_id": id, "thumb": "down" if version == "sums@1" else "up"})
        mine = sum(version == "sums@1" for _, version in answers.values())
        assert shown(server)["trial_ratings"] == mine
        most = shown(server)["trial_most"]
        assert look(server) == "roll back"
        assert kinds(server) == ["gate_passed", "canary_began", "rolled_back"]
        ended, began = shown(server)["transitions"][:2]
        assert "surely lower" in ended["message"] and began["data"]["ratings"] == began["data"]["ratings_needed"] > 10
        assert (
            most == began["data"]["ratings"] and shown(server)["trial_ratings"] is shown(server)["trial_most"] is None
        )
        told = {"stage": "canary", "ratings": mine, "ratings_active": 40 - mine, "rating": 0.0, "rating_active": 1.0}
        assert told.items() <= ended["data"].items()
        assert {chat(server, user)[1] for user in answers} == {"base"} and shown(server)["trial"] is None
        assert "canary was rolled back" in str(server.server.store.refused(PolicyVersion("sums", 1)))


@pytest.mark.long
def test_a_canary_outlives_a_restart_and_is_promoted_if_it_is_rated_as_well(tmp_path: Path) -> None:
    gate = {**GATE, "canary": {"share": 0.5, "margin": 0.5}}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        again = train(server, learning_rate=0.0)
        assert again.state == "running" and again.phase == "swapping", "it waits until the trial is over"
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert shown(server)["trial"] == "sums@1" and shown(server)["trial_most"] > 10
        for user in map(str, range(40)):
            server.http.post("/v1/feedback", json={"rollout_id": chat(server, user)[0], "thumb": "up"})
        assert look(server) == "promote" and shown(server)["active"] == "sums@1"
        assert finish(server).state == "completed" and shown(server)["trial"] == "sums@2"
        assert server.http.post("/v1/learn/reject").json()["trial"] is None
        assert server.http.post("/v1/learn/promote").status_code == 400
        assert server.server.feedback.setting(TRIAL) is None


def test_a_trial_that_the_configuration_has_no_more_ends_with_a_word(tmp_path: Path) -> None:
    gate = {**GATE, "canary": 0.5}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        assert shown(server)["trial"] == "sums@1"
    with whole(tmp_path / "state", Path("starter"), gate=GATE) as server:
        assert shown(server)["trial"] is None and shown(server)["active"] == "base"
        ended = shown(server)["transitions"][0]
        assert (ended["kind"], ended["message"]) == (
            "trial_ended",
            "sums@1 is not on trial any more: gate.canary is not set",
        )
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert shown(server)["trial"] is None, "it has ended"


@pytest.mark.long
def test_a_canary_counts_on_after_a_kill_and_its_clock_stands_still_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("groupwise.server.gate.clock", lambda: clock[0])
    gate = {**GATE, "canary": {"share": 0.5, "minutes": 10.0, "max_errors": 3, "confidence": 0.6}}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        trial = server.server.policies.trial
        assert trial is not None
        versions = [chat(server, str(user))[1] for user in range(12)]
        for _ in range(2):
            trial.failed(trial.version)
        clock[0] += 6 * 60
        assert look(server) == "go on"
        counts = server.server.feedback.setting(COUNTS)
        asked = [versions.count("sums@1"), versions.count("base")]
        assert (counts["seconds"], counts["requests"], counts["errors"]) == (360.0, asked, [2, 0])
    clock[0] += 24 * 3600  # the server is away, and was not told before
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        assert look(server) == "go on", "a day in which nobody could be answered is not the trial's"
        trial = server.server.policies.trial
        assert trial is not None and trial.counts == counts
        clock[0] += 3 * 60
        assert look(server) == "go on"
        trial.failed(trial.version)
        assert (
            look(server) == "roll back"
            and f"3 of {asked[0]} requests failed" in (shown(server)["transitions"][0]["message"])
        )
    with whole(tmp_path / "other", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        clock[0] += 6 * 60
        assert look(server) == "go on"
    with whole(tmp_path / "other", Path("starter"), gate=gate) as server:
        clock[0] += 5 * 60
        assert look(server) == "roll back" and "11 minutes were over" in shown(server)["transitions"][0]["message"]


def test_counts_of_another_trial_are_not_gone_on_from() -> None:
    old = Trial(version=PolicyVersion("a", 2), against=PolicyVersion("a", 1), share=0.1, since=1.0, seconds=60.0)
    new = Trial(version=PolicyVersion("a", 2), against=PolicyVersion("a", 1), share=0.1, since=2.0)
    new.go_on(old.counts)
    assert new.seconds == 0.0


def test_what_was_promoted_by_hand_is_what_others_are_compared_with(tmp_path: Path) -> None:
    gate = {**GATE, "temperature": 0.0, "margin": 1.0, "max_length_ratio": None, "canary": 0.5}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        poison(server)
        data = shown(server)["transitions"][0]["data"]
        assert data["reward"] < data["reward_active"] and shown(server)["trial"] == "sums@1"
        assert server.http.post("/v1/learn/promote").json()["active"] == "sums@1"
        look(server)
        kept = server.server.feedback.setting(BEST)
        assert (kept["best"]["version"], kept["live"]) == ("sums@1", ["sums@1"])


def test_a_trial_ends_when_somebody_activates_another_version(tmp_path: Path) -> None:
    with whole(tmp_path / "state", Path("starter"), gate={**GATE, "canary": "50%"}) as server:
        train(server, learning_rate=0.0)
        server.http.post("/v1/adapters/sums/activate", json={"version": 1})
        assert look(server) == "go on" and shown(server)["trial"] is None
        assert kinds(server)[-1] == "trial_ended"


def test_held_out_prompts_that_cannot_be_read_end_the_start(tmp_path: Path) -> None:
    gate = {**GATE, "prompts": {"source": "gone.jsonl"}}
    with raises(DataError), whole(tmp_path / "state", Path("starter"), gate=gate):
        pass


# ---- the shadow ----


def numbers_right(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for a two-digit number: what the poisoned version never says; needs no column."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [float(len(text) == 2 and text.isdigit()) for text in texts]


SHADOW: dict[str, Any] = {"share": 1.0, "requests": 12, "rewards": [f"{__name__}:numbers_right"]}
LENIENT: dict[str, Any] = {**GATE, "temperature": 0.0, "margin": 0.9, "max_length_ratio": None}


def ask(server: Whole, count: int, **options: Any) -> list[str]:
    """Two-digit sums, one after another, each waited for until its shadow has been answered, too."""
    said = []
    for i in range(count):
        content = f"What is {20 + i % 4} + {40 + i % 8}? Reply with just the number."
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **options}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        said.append(answer["choices"][0]["message"]["content"])
        settle(server)
    return said


def settle(server: Whole) -> None:
    async def settled() -> None:
        assert server.server.gate is not None and server.server.gate.shadow is not None
        if (task := server.server.gate.shadow._task) is not None:
            await task

    assert server.http.portal is not None
    server.http.portal.call(settled)


def test_a_share_alone_is_a_shadow() -> None:
    assert config(shadow="20%").shadow == ShadowConfig(share=0.2) and config().shadow is None
    ranges = [config(shadow=each, reward_range=(0, 2)).shadowing for each in (0.2, {"rewards": []})]
    assert [each and each.reward_range for each in ranges] == [(0, 2), (0, 1)], "of the gate's rewards, or of its own"
    with raises(ValueError):
        config(shadow=2)


def test_a_shadow_refuses_rewards_that_a_live_request_cannot_be_scored_by(tmp_path: Path) -> None:
    with raises(ConfigError), whole(tmp_path / "state", Path("starter"), gate={**GATE, "shadow": 0.5}):
        pass


def plain_answers(server: Whole) -> list[Any]:
    """Answers that depend on their seeds, whole and streamed, without what differs from one time to the next."""
    told = []
    for i in range(6):
        content = f"What is {i}5 + 37? Reply with just the number."
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": i, "stream": i % 2 == 1}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.headers["x-adapter-version"] == "base"
        if i % 2:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            told.append("".join(each["choices"][0]["delta"].get("content") or "" for each in events))
        else:
            told.append([answer.json()[key] for key in ("choices", "usage", "system_fingerprint")])
        if server.server.gate is not None:
            settle(server)  # an answer that ends while a shadow waits for its first token has none: the server is busy
    return told


def test_a_worse_version_is_refused_by_its_shadow_and_users_see_nothing_of_it(tmp_path: Path) -> None:
    with whole(tmp_path / "plain", Path("starter")) as server:
        without = plain_answers(server)
    with whole(tmp_path / "gate", Path("starter"), gate={**LENIENT, "shadow": SHADOW}) as server:
        poison(server)
        assert kinds(server) == ["gate_passed", "shadow_began"] and shown(server)["trial_stage"] == "shadow"
        assert plain_answers(server) == without
        settle(server)
        assert (shown(server)["active"], shown(server)["trial"], shown(server)["trial_pairs"]) == ("base", "sums@1", 6)
        assert (shown(server)["trial_ratings"], shown(server)["trial_most"]) == (None, 12)
        assert look(server) == "go on"
        assert "7" not in ask(server, 8)
        trial = server.server.policies.trial
        assert trial is not None and len(trial.pairs) == 12, "those that are enough"
        assert all(pair.rewards == (0.0, 1.0) for pair in trial.pairs[6:])
        assert look(server) == "roll back"
        last = shown(server)["transitions"][0]
        assert last["kind"] == "shadow_refused" and "its shadowed reward is" in last["message"]
        assert last["data"]["lower_bound"] < -0.2 and last["data"]["prompts"] == 12
        assert (shown(server)["active"], shown(server)["trial"], shown(server)["trial_stage"]) == ("base", None, None)
        assert "its shadow was refused" in str(server.server.store.refused(PolicyVersion("sums", 1)))
        metrics = server.http.get("/metrics").text
        assert 'groupwise_shadow_requests_total{result="answered"} 12.0' in metrics
        tokens = sum(pair.tokens[0] for pair in trial.pairs)
        assert f"groupwise_shadow_tokens_total {tokens}.0" in metrics and "groupwise_shadow_share 0.0" in metrics


@pytest.mark.long
def test_a_shadow_outlives_a_restart_and_an_equal_version_goes_on_to_its_canary_or_live(tmp_path: Path) -> None:
    gate = {**GATE, "shadow": {**SHADOW, "rewards": [], "max_kl": 0.1}}
    with whole(tmp_path / "state", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        assert "answers 100% of the requests once more" in shown(server)["transitions"][0]["message"]
        ask(server, 7)
        assert look(server) == "go on"
    with whole(tmp_path / "state", Path("starter"), gate={**gate, "canary": 0.5}) as server:
        trial = server.server.policies.trial
        assert trial is not None and trial.requests == {True: 7, False: 7}
        assert len(trial.pairs) == 7 and all(
            pair.gap == 0.0 and pair.tokens[0] == pair.tokens[1] for pair in trial.pairs
        )
        ask(server, 5)
        assert look(server) == "promote"
        assert kinds(server) == ["gate_passed", "shadow_began", "shadow_passed", "canary_began"]
        assert (shown(server)["trial_stage"], shown(server)["trial_pairs"]) == ("canary", None)
        passed = shown(server)["transitions"][1]["data"]
        assert (passed["kl"], passed["length_ratio"]) == (0.0, 1.0)
        assert server.http.post("/v1/learn/reject").json()["trial"] is None
    with whole(tmp_path / "live", Path("starter"), gate=gate) as server:
        train(server, learning_rate=0.0)
        ask(server, 12)
        assert look(server) == "promote" and shown(server)["active"] == "sums@1"
        assert kinds(server)[-2:] == ["shadow_passed", "promoted"]


@pytest.mark.long
def test_what_a_busy_server_cannot_answer_once_more_is_dropped_and_a_failure_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = {**GATE, "shadow": {**SHADOW, "requests": 100, "queue": 2, "max_errors": 2}}
    with whole(tmp_path / "state", Path("starter"), gate=gate, batch_rows=8) as server:
        train(server, learning_rate=0.0)
        parts, trial = server.server, server.server.policies.trial
        assert trial is not None and parts.gate is not None and parts.gate.shadow is not None
        long = [[{"role": "user", "content": "Say something long."}]] * 12
        batch = {"prompts": long, "max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(server.http.post, "/v1/completions/batch", json=batch)
            while parts.engine.stats()["waiting"] == 0 and not busy.done():
                time.sleep(0.005)
            answered = ask(server, 1)
            assert not busy.done() and answered, "the user's answer came while others were sampled"
            assert busy.result().status_code == 200
        assert trial.pairs == [] and 'shadow_requests_total{result="dropped"} 1.0' in server.http.get("/metrics").text
        before = len(trial.pairs)
        ask(server, 2, n=2)
        ask(server, 2, adapter="sums@1")
        assert len(trial.pairs) == before, "only single answers of the active version"

        def fails(*args: Any, **options: Any) -> Any:
            raise EngineError("its weights are gone")

        monkeypatch.setattr("groupwise.server.shadow.Generation", fails)
        ask(server, 2)
        assert look(server) == "go on", "two of two may be chance"
        ask(server, 8)
        assert look(server) == "roll back" and "10 of 10 requests failed" in shown(server)["transitions"][0]["message"]
