"""Chat messages to token ids and back, through the model's own chat template.

    encode_prompt       a prompt's token ids: its messages up to where the assistant speaks, or its plain text
    encode_bridge       the ids between the end of an assistant's turn and where it speaks again
    render_prompt       the text behind a prompt's ids;  encode_rendered  those ids;  bridge_of  what a longer one adds
    encode_completion   the ids of a completion known only as text (scored over HTTP)
    decode              ids -> text, without the end-of-turn token
    stopped_text        the same of a completion that a stop string or a stop id has ended
    split_thinking      a reply without its <think> block, and that
    opens_thought       whether a reply begins inside a thought
    template_reads      whether the chat template reads a variable of this name
    configure_chat      the template that is rendered, and what it is told of every chat
    stop_ids            the ids that end a turn

Text is rendered first and tokenised afterwards, piece by piece (`pieces.py`).

**Content cannot forge a turn.** A special token's text inside a message, a tool's schema or a completion ("<|im_end|>"
typed by a user) is tokenised as ordinary characters; only the template writes special tokens (`special_text.py`).
Markers that a tokenizer does not declare special (<think>, <tool_call>) stay tokens wherever they are: in them the
assistant speaks. Plain-text prompts are the caller's own format, and special tokens in them count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from groupwise.config.chat import ChatConfig
from groupwise.errors import ChatError, ConfigError
from groupwise.model.chat_length import check_messages, check_text
from groupwise.model.image_tokens import vision_of
from groupwise.model.pieces import encode_pieces, encode_plain, encode_text, tail_of
from groupwise.model.reply_formats.format import THINK
from groupwise.model.reply_formats.known import format_of
from groupwise.model.special_text import any_of, quotable, quote, special_pattern
from groupwise.model.token_bytes import token_bytes
from groupwise.pictures import is_picture, pictures_in
from groupwise.types import Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters of the rendered text, [start, end)
RENDERING = Lock()  # transformers keeps one compiled template, whose record of assistant spans two threads would share
ENDS = "_groupwise_ends"  # an attribute of a tokenizer: `remember_ends`
TOLD = "_groupwise_told"  # the same: what templates are told of each chat, `configure_chat`
THINK_START, THINK_END = THINK.start, THINK.end
THINKS = "enable_thinking"  # the variable by which templates of models that think at will switch that on and off


# ---- encoding ----
def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    context: int | None = None,
    continues: bool | None = None,
) -> Prompt:
    """Return `prompt` with its `token_ids`; a prompt that has them is returned unchanged.

    Messages are rendered with the generation prompt; when the assistant spoke last, its message is left open and the
    completion continues it, unless `continues` is False. `template_kwargs` reach the template (as in
    `enable_thinking=False`), over those of `configure_chat`.
    Plain text gets the special tokens that the tokenizer puts in front by itself, once, and none behind; the text of a
    prompt that has messages too is taken where the model has no chat template. With `context`, a text that is far
    longer than that many tokens is refused before it is rendered or tokenised whole.

    Raises:
        ChatError: the template is missing or refuses the messages, or the prompt comes to no tokens.
        ContextLengthError: it has more than `context` tokens, as its length or its first part shows. One that is a
            little longer than `context` may be returned.
    """
    if prompt.token_ids:
        return prompt
    if (messages := rendered_messages(prompt, tokenizer)) is not None:
        check_messages(messages, tokenizer, context)
        text = render_prompt(
            messages, tokenizer, tools=prompt.tools, template_kwargs=template_kwargs, continues=continues
        )
        check_text(text, tokenizer, context)
        ids = place_images(encode_text(text, tokenizer), messages, tokenizer)
    elif prompt.text is not None:
        check_text(prompt.text, tokenizer, context)
        ids = encode_plain(prompt.text, tokenizer)
    else:
        raise ChatError(f"prompt {prompt.id!r} has neither messages nor text", hint="give it one of the two")
    if not ids:
        raise ChatError(f"prompt {prompt.id!r} comes to no tokens", hint="give it at least one character")
    return replace(prompt, token_ids=tuple(ids))


def rendered_messages(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[Message, ...] | None:
    """Return the messages that the chat template renders; None where the model reads the prompt's `text` as it is."""
    return None if prompt.text is not None and not tokenizer.chat_template else prompt.messages


def render_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    continues: bool | None = None,
) -> str:
    """Return the text whose ids `encode_prompt` gives, special tokens in content as codes, and each image as the
    placeholder that the template has for it. Raises ChatError as `encode_prompt` does."""
    chat = normalised(messages, tokenizer)
    open_turn = chat[-1]["role"] == "assistant" if continues is None else continues
    text, _ = render_chat(
        chat,
        tokenizer,
        tools=normalised_tools(tools, tokenizer),
        template_kwargs=template_kwargs,
        add_generation_prompt=not open_turn,
        continue_final_message=open_turn,
    )
    return text


def encode_rendered(text: str, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of what `render_prompt` gave for the messages. Raises ChatError when there are none, and as
    `place_images`."""
    if not (ids := encode_text(text, tokenizer)):
        raise ChatError("the chat template renders the messages as nothing", hint="give them at least one character")
    return tuple(place_images(ids, messages, tokenizer))


def place_images(
    ids: Sequence[int], messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, before: int = 0
) -> list[int]:
    """Return the ids of rendered messages with those of their images in the place of the template's placeholders. What
    the messages continue from has `before` images. Raises as `Vision.expand`."""
    if not (pictures := pictures_in(messages)):
        return list(ids)
    vision = vision_of(tokenizer)
    assert vision is not None  # or they had not been rendered
    return vision.expand(ids, pictures, before=before)


@dataclass(frozen=True)
class Bridge:
    """The tokens that a conversation adds after the assistant's message: its end-of-turn token (none where the template
    has none), which the policy may have sampled itself, and all up to where the assistant speaks again."""

    closing: tuple[int, ...]
    following: tuple[int, ...]


def bridge_of(
    asked: str,
    going_on: str,
    history: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] = (),
) -> Bridge | None:
    """Return the bridge behind the assistant's message that ends `history`, so that a conversation continues without
    encoding again what was sampled. None if the template now renders differently what was asked, or drops the message's
    thought.

    Args:
        asked: `render_prompt` of `history` without that message, as the policy saw it.
        going_on: `render_prompt` of `history` and what follows it.
    """
    start = len(asked.rstrip())  # some templates trim what the generation prompt ends with
    if going_on[:start] != asked[:start]:
        return None
    token, special = _turn_end_id(tokenizer), special_pattern(tokenizer)
    begin = going_on.find(str(tokenizer.convert_ids_to_tokens(token)), start) if token is not None else -1
    closed = begin >= 0
    if not closed or special.search(going_on, start, begin):  # that may be the end of a later message
        chat, given = normalised(history, tokenizer), normalised_tools(tools, tokenizer)
        said, _ = render_chat(chat, tokenizer, tools=given)
        end = end_of_turn(said, (start, len(said)), tokenizer)
        if going_on[:end] != said[:end]:
            return None
        last = re.search(rf"(?:{special.pattern})\Z", said[start:end])
        closed, begin = last is not None, start + last.start() if last else _end_of_text(asked, said, chat[-1])
    if not _keeps_thought(going_on[start:begin], history[-1], tokenizer):
        return None
    if not closed:
        return Bridge((), tuple(encode_pieces([going_on[:begin], going_on[begin:]], tokenizer)[1]))
    ids = tuple(encode_text(going_on[begin:], tokenizer))
    return Bridge(ids[:1], ids[1:])


def _end_of_text(asked: str, said: str, message: Mapping[str, Any]) -> int:
    """Return where the assistant's text ends that no token closes; the template's line end is none of its own."""
    exact = f"{asked}{message.get('content', '')}"
    return len(exact) if said.startswith(exact) else len(said.rstrip())


def _keeps_thought(turn: str, message: Message, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a rendered turn has the thought of its message, if that has one."""
    content, marks = message.get("content"), format_of(tokenizer).thought
    if isinstance(apart := message.get("reasoning_content"), str):
        return quote(apart.strip(), quotable(tokenizer)) in turn
    if not isinstance(content, str) or marks.end not in content:
        return True
    thought = content.partition(marks.end)[0].strip().removeprefix(marks.start).strip()
    quoted = re.escape(quote(thought, quotable(tokenizer)))
    return re.search(rf"{quoted}\s*{re.escape(marks.end)}", turn) is not None


def encode_bridge(
    history: Sequence[Message],
    reply: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[int, ...] | None:
    """Return what follows the end-of-turn token of the assistant's message that ends `history`: the template's own
    tokens, the messages of `reply`, and all up to where the assistant speaks again; None where `bridge_of` is.

    Raises ChatError as `encode_prompt` does.
    """
    asked = render_prompt(history[:-1], tokenizer, tools=tools)
    going_on = render_prompt([*history, *reply], tokenizer, tools=tools)
    bridge = bridge_of(asked, going_on, history, tokenizer, tools=tools)
    if bridge is None:
        return None
    return tuple(place_images(bridge.following, reply, tokenizer, before=len(pictures_in(history))))


def encode_completion(prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a completion of `prompt` that is known only as text, and the end-of-turn token after it.

    The text follows the prompt as it is, because that is how it was sampled: the template's rendering of a *finished*
    assistant message may trim it or add to it. Raises ChatError as `encode_prompt` does.
    """
    return CompletionEncoder(prompt, tokenizer).encode(text)


class CompletionEncoder:
    """`encode_completion` for many completions of one prompt, which is rendered and tokenised once.

    Raises ChatError as `encode_prompt` does.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        if (messages := rendered_messages(prompt, tokenizer)) is None:
            ends_turn = prompt.text is None and bool(tokenizer.chat_template)  # token ids alone, of what was rendered
            before, self._end = prompt.text or "", (_turn_end_id if ends_turn else _eos_id)(tokenizer)
        else:
            before = render_prompt(messages, tokenizer, tools=prompt.tools, template_kwargs=template_kwargs)
            self._end = _turn_end_id(tokenizer)
        self._tail = tail_of(before, encode_text(before, tokenizer), tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion, and the end-of-turn token after it."""
        piece = quote(text, quotable(self._tokenizer))
        whole = encode_text(self._tail.text + piece, self._tokenizer)
        before = len(self._tail.ids)
        ids = whole[before:] if whole[:before] == self._tail.ids else encode_text(piece, self._tokenizer)
        return tuple(ids) if self._end is None else (*ids, self._end)


# ---- decoding ----
def decode(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, ends: Collection[int | None] | None = None
) -> str:
    """Return the text of a completion: the end-of-turn token (and padding) is dropped from its end, all else is kept.

    `ends`: `closing_ids(tokenizer)`, from who decodes much.
    """
    ends = closing_ids(tokenizer) if ends is None else ends
    length, vision = len(token_ids), vision_of(tokenizer)
    token_ids = token_ids if vision is None else vision.placeholders(token_ids)
    while length and token_ids[length - 1] in ends:
        length -= 1
    if (known := token_bytes(tokenizer)) is not None:
        return known.text(token_ids[:length])
    text = tokenizer.decode(list(token_ids[:length]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def stopped_text(
    token_ids: Sequence[int],
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int | None] | None = None,
) -> str | None:
    """Return the text of a completion that its last token has ended by one of `params`' stop strings or ids; None where
    it has not. What ended it is cut off, unless it is to stay (`include_stop`). A stop string that stands before the
    end of the first `min_tokens` tokens ends nothing."""
    if len(token_ids) <= params.min_tokens:
        return None
    by_id = token_ids[-1] in params.stop_ids
    if not (by_id or params.stop):
        return None
    text = decode(token_ids[:-1] if by_id and not params.include_stop else token_ids, tokenizer, ends=ends)
    early = len(decode(token_ids[: params.min_tokens], tokenizer, ends=())) if params.min_tokens else 0
    found = ((text.find(stop, max(0, early - len(stop) + 1)), stop) for stop in params.stop)
    cuts = [(at, at + len(stop) * params.include_stop) for at, stop in found if at >= 0]
    if not (by_id or cuts):
        return None
    return text[: min(cuts)[1]] if cuts else text


def closing_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, ...]:
    """Return the ids that end a completion, and padding."""
    return (*stop_ids(tokenizer), cast("int | None", tokenizer.pad_token_id))


def remember_ends(tokenizer: PreTrainedTokenizerBase, generation_eos: int | Sequence[int] | None) -> None:
    """Keep with the tokenizer `eos_token_id` of its model's generation config, which may name several ids (Llama 3)."""
    setattr(tokenizer, ENDS, [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or ()))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a completion: the generation config's (`remember_ends`), the tokenizer's own, and the
    token that closes an assistant turn in the chat template (base models often declare another one and would never
    stop)."""
    own = _eos_id(tokenizer), _turn_end_id(tokenizer) if tokenizer.chat_template else None
    return tuple(dict.fromkeys(i for i in (*getattr(tokenizer, ENDS, ()), *own) if i is not None))


def split_thinking(text: str) -> tuple[str | None, str]:
    """Return (thinking, the rest), both stripped; thinking is None without a thought.

    The <think> may have been in the prompt, and the </think> may be missing when the completion was cut short.

    >>> split_thinking("<think>\\n4+3=7\\n</think>\\n\\n7"), split_thinking("7")
    (('4+3=7', '7'), (None, '7'))
    """
    thought, closed, rest = text.partition(THINK_END)
    if not closed and not text.lstrip().startswith(THINK_START):
        return None, text.strip()
    return thought.strip().removeprefix(THINK_START).strip(), rest.strip()


def template_reads(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template, or one of several, mentions a variable of this name."""
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in _templates(tokenizer))


def configure_chat(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, *, folder: Path = Path()) -> None:
    """Let the tokenizer render all chats as a configuration says. A template's file is looked for in `folder`.

    Raises:
        ConfigError: the template cannot be read, or reads no variable of a name that it is told. Switching thoughts off
            for a model that has none changes nothing, and is not an error.
    """
    if chat.template is not None:
        tokenizer.chat_template = _template_of(chat.template, tokenizer, folder)
    for name, value in chat.template_kwargs.items():
        if changes_nothing(name, value, tokenizer):
            raise ConfigError(
                f"chat.template_kwargs.{name} changes nothing: this model's chat template does not read {name!r}",
                hint="leave it out, or look its name up in that template",
                field=f"chat.template_kwargs.{name}",
            )
    setattr(tokenizer, TOLD, dict(chat.template_kwargs))


def told_always(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables that the tokenizer's template gets for every chat (`configure_chat`)."""
    return dict(getattr(tokenizer, TOLD, {}))


def changes_nothing(name: str, value: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template ignores a variable that it is told. Thoughts that are switched off for a model that
    has none are as they should be."""
    return not (name == THINKS and value is False) and not template_reads(name, tokenizer)


def _template_of(said: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    own = tokenizer.chat_template
    if isinstance(own, Mapping) and said in own:
        return own[said]
    if "{{" in said or "{%" in said:
        return said
    try:
        return (folder / said).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f", or one of {', '.join(own)}" if isinstance(own, Mapping) else ""
        raise ConfigError(
            f"chat.template is {said!r}, and there is no such template: {error}",
            hint=f"give the path of a Jinja file, from where the configuration is{names}",
            field="chat.template",
        ) from None


def template_thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template, or one of several, has what begins a thought (<think>), or its end."""
    marks = format_of(tokenizer).thought
    return any(mark in text for text in _templates(tokenizer) for mark in (marks.start, marks.end))


def _templates(tokenizer: PreTrainedTokenizerBase) -> Iterable[str]:
    template = tokenizer.chat_template
    return template.values() if isinstance(template, Mapping) else [template or ""]


def opens_thought(prompt_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a prompt ends with what begins a thought (<think>), so that the reply begins inside it."""
    start = format_of(tokenizer).thought.start
    most = len(start.encode()) + 2  # tokens of one byte each, and space
    return decode(prompt_ids[-most:], tokenizer).rstrip().endswith(start)


# ---- rendering ----
def render_chat(
    chat: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> tuple[str, list[Span]]:
    """Return the rendered text, and the spans that the template marks as the assistant's (none if it marks nothing)."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise ChatError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template for these messages",
            hint="set one (tokenizer.chat_template), use the model's instruct variant, or give prompts as plain text",
        ) from error
    marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    told = {**told_always(tokenizer), **(template_kwargs or {})}
    try:
        with RENDERING:
            texts, spans = render_jinja_template(
                conversations=[chat],
                tools=cast("list[Any] | None", tools),
                chat_template=template,
                return_assistant_tokens_mask=marked and not continue_final_message,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**tokenizer.special_tokens_map, **quote(told, quotable(tokenizer))},
            )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(message["role"] for message in chat)
        raise ChatError(
            f"the chat template refuses these messages (roles: {roles}): {error}",
            hint="use the template's roles in its order; where it has no system role, begin the user message with it",
        ) from error
    return texts[0], cast("list[Span]", list(spans[0])) if spans else []


def end_of_turn(text: str, span: Span, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return where the assistant's turn really ends: behind its end-of-turn token, before a newline or another special
    token.

    That token is the first special one with nothing but space and special tokens behind it, the first that ends a
    completion (`stop_ids`) where there is one among those, or else the one that follows the span at once. Content has
    no special tokens: they are quoted.
    """
    (start, end), special = span, special_pattern(tokenizer)
    tail = re.search(rf"({special.pattern})(?:\s|{special.pattern})*\Z", text[start:end])
    if tail is not None:
        closing = any_of(tuple(map(str, tokenizer.convert_ids_to_tokens(list(stop_ids(tokenizer))))))
        last = closing.search(tail[0])  # behind what may close calls (Kimi's section, say)
        return start + (tail.end(1) if last is None else tail.start() + last.end())
    following = special.match(text, end)
    return following.end() if following is not None else end


@lru_cache(maxsize=8)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    """Return the id of the token that closes an assistant turn; the tokenizer's eos where the template shows none."""
    answer = "Groupwise"
    chat = [{"role": "user", "content": "Name?"}, {"role": "assistant", "content": answer}]
    try:
        text, _ = render_chat(chat, tokenizer)
    except ChatError:  # a template that cannot even do this fails again, with its reason, where it is used
        return _eos_id(tokenizer)
    shown = special_pattern(tokenizer).search(text, text.rfind(answer) + len(answer))
    closing = shown[0] if shown is not None else next_role(chat, text, tokenizer)
    return cast(int, tokenizer.convert_tokens_to_ids(closing)) if closing else _eos_id(tokenizer)


def next_role(chat: list[dict[str, Any]], text: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Return the special token with which the next message begins after a conversation that is rendered as `text`: GLM
    ends its turn by <|user|>, or by <|observation|> after calls. "" where the template has none, or takes no such
    message. `options` are `render_chat`'s."""
    calls = chat[-1].get("tool_calls") or ()
    follows = [{"role": "tool", "content": "0", "tool_call_id": call.get("id")} for call in calls]
    try:
        longer, _ = render_chat([*chat, *(follows or [{"role": "user", "content": "And?"}])], tokenizer, **options)
    except ChatError:
        return ""
    if not longer.startswith(text):
        return ""
    found = special_pattern(tokenizer).match(longer, len(text))
    return found[0] if found is not None and found[0] != tokenizer.bos_token else ""


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return cast("int | None", tokenizer.eos_token_id)


def _turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return _turn_end(tokenizer, str(tokenizer.chat_template))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the token that closes an assistant turn; "" where there is none."""
    id = _turn_end_id(tokenizer)
    return "" if id is None else str(tokenizer.convert_ids_to_tokens(id))


# ---- messages as the templates want them ----
def normalised(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return messages as plain dicts without None values, text parts joined, tool arguments and thoughts where the
    family's template takes them, special tokens' texts quoted; images as parts {"type": "image"}.

    Raises:
        ChatError: there are no messages, or one of them has what the model does not read.
    """
    if not messages:
        raise ChatError("the list of messages is empty", hint="give at least one user message")
    if pictures_in(messages):
        _check_images(messages, tokenizer)
    texts = quotable(tokenizer)
    chat = list[dict[str, Any]]()
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {i} is {message!r}; a message is an object with a role and a content")
        plain = {key: value for key, value in message.items() if value is not None}
        if "content" in plain:
            plain["content"] = _joined(plain["content"], i)
        if "tool_calls" in plain:
            plain["tool_calls"] = [_with_object_arguments(call) for call in message.get("tool_calls") or ()]
            plain.setdefault("content", "")  # templates add texts to it
        chat.append(plain)
    chat = _quoted(format_of(tokenizer).history(chat), texts)
    if any(message.get("tool_calls") for message in chat) and _joins_arguments(tokenizer, str(tokenizer.chat_template)):
        for message in chat:
            for call in message.get("tool_calls") or ():
                _write_arguments(call)
    return chat


@lru_cache(maxsize=8)
def _joins_arguments(tokenizer: PreTrainedTokenizerBase, _: str) -> bool:
    """Return whether the template joins a call's arguments with other texts, as DeepSeek's do: an object is refused,
    and its JSON is not."""
    for arguments in ({"a": 1}, '{"a": 1}'):
        call: dict[str, Any] = {"id": format_of(tokenizer).call_id(0), "type": "function"}
        call["function"] = {"name": "f", "arguments": arguments}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            render_chat([{"role": "user", "content": "Go."}, called], tokenizer)
        except ChatError:
            continue
        return isinstance(arguments, str)
    return False


def _write_arguments(call: dict[str, Any]) -> None:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def normalised_tools(
    tools: Sequence[dict[str, Any]] | None, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]] | None:
    """Return the tools with special tokens' texts quoted; None where there are none. Raises ChatError."""
    return _quoted(list(tools), quotable(tokenizer)) if tools else None


def _quoted(value: Any, texts: tuple[str, ...]) -> Any:
    try:
        return quote(value, texts)
    except RecursionError:
        raise ChatError(
            "the messages or the tools have lists and objects within one another without end", hint="send flatter ones"
        ) from None


def _check_images(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ChatError where the model takes no images, or the assistant says one."""
    if vision_of(tokenizer) is None:
        name = tokenizer.name_or_path or "this model"
        raise ChatError(
            f"a message has an image, and {name} reads text alone",
            hint="use a model that sees, such as starter-vl: docs/images.md",
        )
    if any(message.get("role") == "assistant" and pictures_in([message]) for message in messages):
        raise ChatError("a message of the assistant's has an image, and a model says none", hint="leave it out")


def _joined(content: Any, index: int) -> str | list[dict[str, Any]]:
    """Return the text of parts, or the parts where images are among them, without their bytes."""
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not (text or is_picture(part)):
            raise ChatError(f"message {index} has content {part!r}; this model reads text: a string or text parts")
    if any(map(is_picture, parts)):
        return [{"type": "image"} if is_picture(part) else {"type": "text", "text": part["text"]} for part in parts]
    return "".join(part["text"] for part in parts)


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI sends `arguments` as a JSON string; templates want the object, or they would quote the string again."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(given := function.get("arguments"), str):
        return dict(call)
    with suppress(ValueError, RecursionError):
        arguments = json.loads(given or "{}")
        json.dumps(arguments, allow_nan=False)  # 1e400 would become an infinity
        if isinstance(arguments, dict):  # and not a text that merely reads as JSON
            return {**call, "function": {**function, "arguments": arguments}}
    return dict(call)
