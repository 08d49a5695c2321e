"""A whole conversation as a training sample: token ids, and a mask that is 1 on what the assistant said.

    sample = encode_supervised(messages, tokenizer)

Where the assistant speaks is what the chat template marks with {% generation %}. Without the mark it is found by
rendering the conversation turn by turn. What the template puts behind the assistant's name when it asks for a reply,
such as the <think> that some models begin with, is the prompt's and is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from groupwise.errors import ChatError
from groupwise.model.chat import Span, end_of_turn, next_role, normalised, normalised_tools, render_chat, turn_end
from groupwise.model.chat_length import check_again, check_messages, check_text
from groupwise.model.image_tokens import vision_of
from groupwise.model.pieces import encode_pieces
from groupwise.model.special_text import special_pattern
from groupwise.pictures import pictures_in
from groupwise.types import Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW_MESSAGES = 8  # of a conversation whose every prefix may be rendered
KEEP_HISTORY = (
    "set a chat template that keeps earlier turns as they were, or give each assistant turn its own conversation"
)


def encode_supervised(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    context: int | None = None,
) -> Sample:
    """Return a conversation as a Sample: `prompt_ids` up to the assistant's first word, `completion_ids` from there to
    the end of its last turn, `mask` 1 on its own tokens, each turn's end-of-turn token included and what follows that
    not. Where the template closes a turn only by the next role's token, or the last one not at all, the last turn ends
    with the token that a reply is sampled up to.

    Where the assistant speaks is what the template marks with {% generation %}; without the mark it is found by
    rendering the conversation turn by turn. With `context`, a text that is far longer than that many tokens is refused
    before it is rendered or tokenised.

    Raises:
        ChatError: there is no assistant turn, the template is missing, refuses the messages or leaves out calls of
            tools, or a template without the mark rewrites earlier turns, as the mask would then lie.
        ContextLengthError: it has more than `context` tokens, as its length shows.
    """
    check_messages(messages, tokenizer, context)
    chat = normalised(messages, tokenizer)
    if not any(message["role"] == "assistant" for message in chat):
        raise ChatError("no assistant turn in the conversation: nothing to train", hint="add one")
    options = {"tools": normalised_tools(tools, tokenizer), "template_kwargs": template_kwargs}
    text, spans = render_chat(chat, tokenizer, **options)
    check_text(text, tokenizer, context)
    if spans:
        opening = _opening(tokenizer, **options)
        spans = [(_behind(opening, text, start, end), end) for start, end in spans]
    else:
        spans = _spans_turn_by_turn(text, chat, tokenizer, **options)
    spans = [(start, end_of_turn(text, (start, end), tokenizer)) for start, end in spans]
    _check_calls(chat, "".join(text[start:end] for start, end in spans), tokenizer)
    start, end = spans[-1]
    if chat[-1]["role"] == "assistant" and not _is_closed(text[start:end], tokenizer):
        text = text[:end] + (next_role(chat, text, tokenizer, **options) or turn_end(tokenizer))
        spans[-1] = start, len(text)
    edges = [0, *(edge for span in spans for edge in span)]
    pieces = _with_images(encode_pieces([text[a:b] for a, b in pairwise(edges)], tokenizer), messages, tokenizer)
    completion = [(token, i % 2) for i, piece in enumerate(pieces[1:], start=1) for token in piece]
    return Sample(
        prompt_ids=tuple(pieces[0]),
        completion_ids=tuple(token for token, _ in completion),
        mask=tuple(said for _, said in completion),
    )


def _with_images(
    pieces: list[list[int]], messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Return the ids of the pieces of a rendered conversation with its images written out; those the assistant says
    have none. Raises as `Vision.expand`."""
    if not (pictures := pictures_in(messages)):
        return pieces
    vision, marked = vision_of(tokenizer), list[int]()
    assert vision is not None  # or they had not been rendered
    edge = -1  # no token's id
    for piece in pieces:
        marked += [*piece, edge]
    expanded, split = vision.expand(marked, pictures), [list[int]()]
    for token in expanded:
        if token == edge:
            split.append([])
        else:
            split[-1].append(token)
    return split[:-1]


def _check_calls(chat: Sequence[Mapping[str, Any]], said: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ChatError where a template shows nothing of a call, of which a turn without words would be left."""
    calling = [i for i, message in enumerate(chat) if message["role"] == "assistant" and message.get("tool_calls")]
    said = special_pattern(tokenizer).sub("", said) if calling else ""
    for i in calling:
        for call in chat[i]["tool_calls"]:
            if (name := call["function"]["name"]) not in said:
                raise ChatError(
                    f"the chat template leaves out calls of tools: {name!r}, which message {i} (assistant) calls, is "
                    f"not in what it renders",
                    hint="set a template that shows calls (chat.template), or write them into the content",
                )


def _is_closed(said: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a turn, up to `end_of_turn`, ends with a special token."""
    return any(found.end() == len(said) for found in special_pattern(tokenizer).finditer(said))


def _opening(tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Return what the template adds to a conversation to ask for a reply: "<|im_start|>assistant\\n<think>\\n" with
    some."""
    asked = [{"role": "user", "content": "Name?"}]
    try:
        before, _ = render_chat(asked, tokenizer, **options)
        after, _ = render_chat(asked, tokenizer, **options, add_generation_prompt=True)
    except ChatError:  # the template takes no such conversation
        return ""
    return after.removeprefix(before) if after.startswith(before) else ""


def _behind(opening: str, text: str, start: int, end: int) -> int:
    """Return where the assistant's own words begin in a marked span: behind the part of the opening that the span
    holds."""
    for known in range(len(opening)):  # the longest part first
        if text.startswith(opening[known:], start, end) and text.endswith(opening[:known], 0, start):
            return start + len(opening) - known
    return start


def _spans_turn_by_turn(
    text: str, chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> list[Span]:
    """Return where the assistant speaks in `text`: from the end of each turn's generation prompt to the end of that
    turn.

    Every prefix of the conversation is rendered, which is quadratic; of a long one the last turns alone, as far as that
    gives `text` as well.
    """
    if len(chat) > FEW_MESSAGES:
        try:
            if spans := _spans_by_windows(text, chat, tokenizer, **options):
                return spans
        except ChatError:  # the template takes no part of the conversation for one
            pass
    return _spans_by_prefixes(text, chat, tokenizer, **options)


def _spans_by_prefixes(
    text: str, chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> list[Span]:
    spans, rendered = [], 0
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before, after, span = _turn(chat[: i + 1], tokenizer, **options)
        if not after.startswith(before) or not text.startswith(after[: span[1]]):
            raise ChatError(
                f"the chat template rewrites history: message {i} (assistant) is rendered differently once the "
                f"conversation goes on, or its turn does not begin with the generation prompt",
                hint=KEEP_HISTORY,
            )
        spans.append(span)
        rendered += len(before) + len(after)
        check_again(rendered, text, chat)
    return spans


def _spans_by_windows(
    text: str, chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> list[Span] | None:
    """Return the spans, from each turn rendered as the last one of a short conversation: the system message, one
    message of the user, and the assistant's two turns before it with what lies between. None unless what each turn adds
    to the one before is what stands in `text`, one after another."""
    opening = next((i for i, message in enumerate(chat) if message["role"] != "system"), 0)
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    asked = [max((j for j in range(a, b) if chat[j]["role"] == "user"), default=None) for a, b in pairwise([0, *turns])]
    spans, user = list[Span](), None
    for t, turn in enumerate(turns):
        window, last, known = chat[: turn + 1], "", 0
        if t:
            user = user if asked[t - 1] is None else asked[t - 1]
            begin = max(turns[t - 2] if t > 1 else opening, opening if user is None else user + 1)
            head = [*chat[:opening], *([] if user is None else [chat[user]])]
            window = [*head, *chat[begin : turn + 1]]
            _, last, (_, known) = _turn(window[: len(head) + turns[t - 1] - begin + 1], tokenizer, **options)
        before, after, span = _turn(window, tokenizer, **options)
        start, added = spans[-1][1] if spans else 0, after[known : span[1]]
        if not (after.startswith(before) and before.startswith(last[:known]) and text.startswith(added, start)):
            return None
        spans.append((start + span[0] - known, start + len(added)))
    return spans


def _turn(chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[str, str, Span]:
    """Return a conversation that the assistant's message ends: rendered up to where it speaks, rendered whole, and the
    span of what it says in the latter."""
    before, _ = render_chat(chat[:-1], tokenizer, **options, add_generation_prompt=True)
    after, _ = render_chat(chat, tokenizer, **options)
    start = len(before)
    return before, after, (start, end_of_turn(after, (start, len(after)), tokenizer))
