"""Which request goes on from which answer, and what the policy then sees; with scripted answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import calls_of
from groupwise.algo.samples import segments_of
from groupwise.model.reply_formats.known import FORMATS
from groupwise.tasks.conversations import Conversations
from groupwise.tasks.dialects.chat_form import ChatMessage
from groupwise.tasks.reply import Reply
from groupwise.tasks.starter.tasks import CALCULATOR
from groupwise.tasks.tool_calls import parse
from groupwise.types import Completion, FinishReason, Message

USER: Message = {"role": "user", "content": "What is 3 + 4?"}
MORE: Message = {"role": "user", "content": "Sure?"}
CALL_TEXT = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(text: str, tokenizer, *, end: bool = True) -> Completion:
    ids = tuple(tokenizer.encode(text, add_special_tokens=False)) + ((tokenizer.eos_token_id,) if end else ())
    reason = FinishReason.STOP if end else FinishReason.LENGTH
    return Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), text=text, finish_reason=reason)


def turn(talk: Conversations, messages: list[Any], text: str, tokenizer, tools: Any = (), **options: Any) -> Message:
    """Ask and answer; the message as a client parses it and sends it back."""
    asked = talk.ask(messages, tools)
    sent = talk.answer(asked, said(text, tokenizer, **options))
    return ChatMessage.model_validate_json(json.dumps({"refusal": None, "annotations": [], **sent})).as_message()


def test_branches_are_ordered_one_after_another(tokenizer):
    talk = Conversations(tokenizer)
    a = turn(talk, [USER], "A", tokenizer)
    e = turn(talk, [{"role": "user", "content": "Else"}], "E", tokenizer)
    b = turn(talk, [USER, a, MORE], "B", tokenizer)
    d = turn(talk, [USER, a, {"role": "user", "content": "Again"}], "D", tokenizer)
    turn(talk, [USER, a, MORE, b, MORE], "C", tokenizer)
    assert [each.completion.text for each in talk.turns()] == ["A", "B", "C", "D", "E"]
    assert [each.turn.completion.text for each in talk.answered] == ["A", "E", "B", "D", "C"]
    assert [sum(each.mask) for each in segments_of(talk.turns())] == [6, 2, 2]  # A B C, D, E: a letter and its end
    assert [each.trained for each in talk.turns(only_first=True)] == [True, False, False, False, False]
    first, last = talk.turns()[0], talk.turns()[3]
    assert last.prompt_ids[: len(first.prompt_ids) + 2] == first.prompt_ids + first.completion.token_ids
    assert (e["content"], d["content"]) == ("E", "D")


def test_nothing_that_was_sampled_is_encoded_again(tokenizer):
    """The answer's tokens are not those that its text would have; the next prompt has them as they were."""
    talk = Conversations(tokenizer)
    letters = tuple(i for letter in "expression" for i in tokenizer.encode(letter, add_special_tokens=False))
    assert letters != tuple(tokenizer.encode("expression", add_special_tokens=False))
    ids = (*letters, tokenizer.eos_token_id)
    sampled = Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), text="expression", finish_reason=FinishReason.STOP)
    asked = talk.ask([USER], ())
    answer: Any = talk.answer(asked, sampled)
    seen = talk.ask([USER, answer, MORE], ()).transcript.prompt_ids
    assert seen[: len(asked.transcript.turns[0].prompt_ids) + len(ids)] == asked.transcript.turns[0].prompt_ids + ids


def test_a_conversation_is_recognised_however_it_is_spelled(tokenizer):
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "47*12"}}\n</tool_call>'
    talk = Conversations(tokenizer)
    answer: Any = turn(talk, [USER], call, tokenizer, [CALCULATOR])
    assert "content" not in answer and json.loads(answer["tool_calls"][0]["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "564"}
    respelled = copy.deepcopy(answer)
    respelled["tool_calls"][0]["function"]["arguments"] = '{"expression":  "47*12"}'
    respelled["content"] = None
    assert talk.ask([USER, respelled, result], [CALCULATOR]).before is talk.answered[0]
    for other in (
        [USER, {**answer, "content": "x"}, result],
        [{**USER, "content": "What is 3 + 5?"}, answer, result],
        [USER, {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": "another"}]}, result],
    ):
        assert talk.ask(other, [CALCULATOR]).before is None
    assert talk.ask([USER, answer, result], ()).before is None  # other tools are another prompt


def test_calls_have_ids_of_their_own_and_one_can_be_asked_for(tokenizer):
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    talk = Conversations(tokenizer)
    both: Any = turn(talk, [USER], call + call, tokenizer, [CALCULATOR])
    asked = talk.ask([MORE], [CALCULATOR])
    reply = talk.reply(asked, one_call=True)
    assert [part.id for part in (*reply.push(call + call), *reply.finish())] == ["call_2"]
    one: Any = talk.answer(asked, said(call + call, tokenizer), reply=reply)
    ids = [each["id"] for each in (*both["tool_calls"], *one["tool_calls"])]
    assert len(ids) == len(set(ids)) == 3 and talk.calls == 3
    result: Any = {"role": "tool", "tool_call_id": ids[2], "content": "2"}
    assert talk.ask([MORE, one, result], [CALCULATOR]).before is talk.answered[1]


PIECES = [
    "Hm. ",
    "\n",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "{",
    '"name"',
    CALL_TEXT,
    "</tool_call",
    "é",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 7), st.booleans())
def test_the_calls_that_are_sent_are_those_of_the_transcript(parts, width, thinks):
    """However the text was cut into pieces, the client gets the calls that a whole reply has."""
    text = "".join(parts)
    parser = FORMATS["hermes"].parser(thinks=thinks, tools=[CALCULATOR])
    reply = Reply(parser, new_id=iter(map(str, range(99))).__next__)
    for start in range(0, len(text), width):
        reply.push(text[start : start + width])
    reply.finish()
    whole = parse(text, FORMATS["hermes"], tools=[CALCULATOR], thinking=thinks)
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls_of(whole)


def test_an_answer_that_was_cut_goes_on_in_another_segment_or_the_same_but_is_never_lost(tokenizer):
    talk = Conversations(tokenizer)
    cut = turn(talk, [USER], "It is", tokenizer, end=False)
    turn(talk, [USER, cut, MORE], "7", tokenizer)
    first, second = talk.turns()
    assert sum(sum(each.mask) for each in segments_of([first, second])) == len(first.completion.token_ids) + 2


@pytest.mark.parametrize("drops", [False, True])
def test_thoughts_are_sent_apart_and_a_template_that_drops_them_forks(tokenizer, drops):
    tokenizer = copy.deepcopy(tokenizer)
    if drops:
        tokenizer.chat_template = DROPS_THOUGHTS
    talk = Conversations(tokenizer)
    asked = talk.ask([USER], ())
    sent: Any = talk.answer(asked, said("<think>\n3+4=7\n</think>\n\n7", tokenizer))
    assert (sent["content"], sent["reasoning_content"]) == ("7", "3+4=7")
    turn(talk, [USER, {"role": "assistant", "content": "7"}, MORE], "Yes", tokenizer)
    first, second = talk.turns()
    extends = second.prompt_ids[: len(first.prompt_ids) + len(first.completion.token_ids)]
    assert (extends == first.prompt_ids + first.completion.token_ids) is not drops
    assert len(segments_of([first, second])) == 1 + drops
    assert ("3+4" in tokenizer.decode(list(second.prompt_ids))) is not drops


def test_a_prompt_that_opens_a_thought(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = DROPS_THOUGHTS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    talk = Conversations(tokenizer)
    closed: Any = talk.answer(talk.ask([USER], ()), said("3+4=7\n</think>\n7", tokenizer))
    assert (closed["content"], closed["reasoning_content"]) == ("7", "3+4=7")
    cut: Any = talk.answer(talk.ask([MORE], ()), said("3+4=", tokenizer, end=False))
    assert (cut["content"], cut["reasoning_content"]) == ("", "3+4=")
