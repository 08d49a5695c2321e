"""One episode as the learner gets it: what is trained, what is seen, where a new segment begins."""

from __future__ import annotations

from groupwise.tasks.check.token_runs import SEEN, TRAINED, drawn, runs_of, summary
from groupwise.types import Completion, FinishReason, Rollout, Turn


def turn(prompt: tuple[int, ...], said: tuple[int, ...], **options) -> Turn:
    completion = Completion(token_ids=said, logprobs=(0.0,) * len(said), text="", finish_reason=FinishReason.STOP)
    return Turn(prompt, completion, **options)


def test_runs_are_the_segments_token_by_token(tokenizer):
    ids = {word: tuple(tokenizer.encode(word, add_special_tokens=False)) for word in ("ask", "call", "told", "done")}
    first = turn(ids["ask"], ids["call"], reward=0.5)
    second = turn(ids["ask"] + ids["call"] + ids["told"], ids["done"])
    [runs] = runs_of(Rollout(turns=(first, second), stop="done", reward=1.0), tokenizer)
    assert [(run.trained, run.text, run.tokens) for run in runs] == [
        (False, "ask", len(ids["ask"])),
        (True, "call", len(ids["call"])),
        (False, "told", len(ids["told"])),
        (True, "done", len(ids["done"])),
    ]


def test_a_fork_is_marked_and_colours_follow_the_mask(tokenizer):
    end = tokenizer.eos_token_id
    asked, said = (*tokenizer.encode("a\nb"), end), (*tokenizer.encode("yes"), end)
    rollout = Rollout(
        turns=(turn(asked, said), turn(said, said, reward=-1.0), turn(said, said, trained=False)), stop="done"
    )
    assert len(runs_of(rollout, tokenizer)) == 2
    lines = drawn(rollout, tokenizer)
    assert [line.plain.split()[0] for line in lines] == ["seen", "trained", "--", "seen", "trained"]
    assert "segment 2" in lines[2].plain and "<|im_end|>" in lines[1].plain
    styles = [str(line.spans[-1].style) for line in (lines[0], lines[1])]
    assert styles == [SEEN, TRAINED]
    assert lines[0].plain.splitlines()[1].lstrip().startswith("b")  # the second line of a text stands under its first
    assert summary(rollout) == "3 turns (their rewards: -, -1, -), ended: done, no reward"


def test_of_an_episode_without_turns_there_is_nothing_to_draw(tokenizer):
    rollout = Rollout(turns=(), stop="error", error="Env.reset raised KeyError: 'city'")
    assert drawn(rollout, tokenizer) == [] and summary(rollout).endswith("no reward; Env.reset raised KeyError: 'city'")
