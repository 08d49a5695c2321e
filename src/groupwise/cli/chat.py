"""`groupwise chat [RUN] [MESSAGE]`: a conversation with what a run trained, here, or with what a server serves.

    groupwise chat arithmetic                                # the newest run of this name; a conversation
    groupwise chat runs/arithmetic-1@80 "What is 47 + 138?"  # one answer of its version 80
    groupwise chat "What is 47 + 138?"                       # one answer of the server on this machine
    groupwise chat --url http://host:8420                    # a conversation with another server
    groupwise chat images "How many?" --image 7.png          # ... with one that sees

With a RUN the model is loaded into this process and no server is asked. A reply is printed while it is sampled; what
was thought before it, and which version gave it, goes to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import urlsplit

import typer

from groupwise.cli.frame import ApiKey, AsJson, Debug, Url, examples, open_client, print_answer, quiet_libraries
from groupwise.cli.output import say
from groupwise.cli.remote import Adapter, MaxTokens, Seed, Temperature
from groupwise.errors import AdapterNotFoundError, ConfigError, ContextLengthError, RemoteError
from groupwise.model.reply_formats.parser import ReplyPart, joined
from groupwise.pictures import Picture, read_picture
from groupwise.tasks.transcript import visible

if TYPE_CHECKING:
    from groupwise.engine.local import LocalEngine
    from groupwise.model.load import LoadedModel
    from groupwise.sdk.client import Client
    from groupwise.store.locate import TrainedPolicy
    from groupwise.types import Completion, Grammar, SamplingParams

MAX_TOKENS = 2048  # of a reply, where --max-tokens does not say; less where the context is full before


def add_to(app: typer.Typer) -> None:
    """Make the command part of `groupwise`."""
    app.command(
        epilog=examples(
            "groupwise chat arithmetic",
            'groupwise chat runs/arithmetic-20260101T120000Z@80 "What is 47 + 138?"',
            'groupwise chat "What is 47 + 138?"',
            "groupwise chat --url http://localhost:8420 --adapter math@3",
        ),
    )(chat)


def chat(
    run_or_message: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run (directory, name, RUN@N), a PEFT directory or hf://OWNER/NAME, asked here; without one a "
            "server is asked.",
            show_default=False,
        ),
    ] = None,
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Default: a conversation, or stdin.", show_default=False)
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="In front of the first message: a file, or its https:// address; may be repeated."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before it; default: a run's own, '' is none.")
    ] = None,
    adapter: Adapter = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Talk to what a run trained, or to a server; the reply is printed while it is sampled."""
    policy, text = _meant(run_or_message, message, url=url, adapter=adapter)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    rendered: dict[str, Any] = {}
    if policy is not None:
        manner = policy.manner
        system = manner.get("system") if system is None else system
        options["grammar"] = _grammar(manner.get("structured_outputs"))
        rendered = manner.get("chat", {})
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    images = [{"type": "image_url", "image_url": {"url": _shown(each).url}} for each in image or ()]
    if policy is not None:
        with closing(LocalPartner(policy, options, rendered)) as partner:
            return _converse(partner, messages, text, images, as_json=as_json)
    with open_client(url, api_key) as client:
        try:
            _converse(ServerPartner(client, {"adapter": adapter, **options}), messages, text, images, as_json=as_json)
        except RemoteError as error:
            if url is None and message is None and text is not None and " " not in text.strip():
                error.hint = f"{error.hint or ''}; nor is there a run {text!r}".removeprefix("; ")
            raise


def _grammar(form: Any) -> Grammar | None:
    """Return what the replies of a run must be, from what its configuration says."""
    from groupwise.config.structured import StructuredOutputsConfig

    return None if form is None else StructuredOutputsConfig.model_validate(form).as_grammar("structured_outputs")


def _meant(
    first: str | None, second: str | None, *, url: str | None, adapter: str | None
) -> tuple[TrainedPolicy | None, str | None]:
    """Return the policy to load here (None: a server is asked) and the message (None: what is typed).

    Of two words the first is the run. One word alone is a run if there is one of this name, else a message.
    """
    from groupwise.store.locate import UNTRAINED, find_policy

    if url is not None or first is None:
        if second is not None:
            raise ConfigError(
                f"both a RUN ({first!r}) and a server are given",
                hint="leave --url out, or name --adapter and a MESSAGE",
            )
        return None, first
    try:
        policy = find_policy(first)
    except AdapterNotFoundError as error:
        if second is not None or error.kind == UNTRAINED or ("@" in first and " " not in first):
            raise
        return None, first
    if adapter is not None:
        raise ConfigError(
            f"--adapter chooses a policy of a server, and {first!r} is a run",
            hint=f"name the version: groupwise chat {first.partition('@')[0]}@N",
        )
    return policy, second


# ---- the conversation ----


class Partner(Protocol):
    """The partner of a chat: a model here or behind a server, which answers."""

    def answer(self, messages: Sequence[Any]) -> tuple[dict[str, Any], str]:
        """Return the reply as JSON, and its text."""
        ...

    def print_reply(self, messages: Sequence[Any]) -> str:
        """Print the reply as it comes and return its text."""
        ...


def _shown(image: str) -> Picture:
    """Return the image of a file or of an address, whose host is allowed as it is spelt out. Raises DataError."""
    parts = urlsplit(image)
    if parts.scheme not in ("http", "https"):
        return read_picture(image, where="--image")
    from groupwise.config.images import AllowedHost
    from groupwise.tasks.fetching import fetch_picture, not_fetched

    try:
        host = AllowedHost.of(f"{parts.scheme}://{parts.netloc}")
    except ValueError as error:
        raise not_fetched(image, str(error), where="--image") from error
    return fetch_picture(image, [host], where="--image")


def _converse(partner: Partner, messages: list[Any], text: str | None, images: Sequence[Any], *, as_json: bool) -> None:
    for said in [text] if text is not None else _typed():
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": said}] if images else said})
        images = ()
        if as_json:
            answered, reply = partner.answer(messages)
            print_answer(answered)
        else:
            reply = partner.print_reply(messages)
        messages.append({"role": "assistant", "content": reply})


def _typed() -> Iterator[str]:
    """Yield what the user types, message by message; or all of stdin if stdin is not a terminal."""
    if not sys.stdin.isatty():
        yield sys.stdin.read()
        return
    say("an empty line or Ctrl-D ends")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _say_who(version: str | None, *, cut: bool) -> None:
    if cut:
        say(f"({version}: cut at its longest; --max-tokens asks for more)")
    elif version:
        say(f"({version})")


# ---- with a server ----


class ServerPartner:
    """The policy of a server. `options` are those of `Client.chat`."""

    def __init__(self, client: Client, options: Mapping[str, Any]):
        self._client, self._options = client, options

    def answer(self, messages: Sequence[Any]) -> tuple[Any, str]:
        reply = self._client.chat(messages, **self._options)
        return reply, reply.text

    def print_reply(self, messages: Sequence[Any]) -> str:
        text, version, finish, thinking = "", None, None, False
        for delta in self._client.chat_stream(messages, **self._options):
            if delta.reasoning or (thinking and (delta.text or delta.tool_calls)):
                thinking = bool(delta.reasoning)
                sys.stderr.write(visible(delta.reasoning) or "\n")
                sys.stderr.flush()
            for call in delta.tool_calls:
                sys.stdout.write(visible(json.dumps(call.function.model_dump(mode="json"))) + "\n")
            sys.stdout.write(visible(delta.text))
            sys.stdout.flush()
            text += delta.text
            version, finish = delta.version or version, delta.finish_reason or finish
        sys.stdout.write("\n")
        _say_who(version, cut=finish == "length")
        return text


# ---- in this process ----


class LocalPartner:
    """The policy that a run trained, loaded into this process; `rendered` is the run's `chat`.

    Raises:
        ModelError, AdapterError: it cannot be loaded.
    """

    def __init__(self, policy: TrainedPolicy, options: Mapping[str, Any], rendered: Mapping[str, Any]):
        from groupwise.config.chat import ChatConfig
        from groupwise.engine.local import LocalEngine
        from groupwise.model.chat import configure_chat
        from groupwise.model.load import load_model
        from groupwise.types import PolicyVersion

        quiet_libraries()
        self._options = options
        self._base: LoadedModel = load_model(policy.model, quantization=policy.quantization)
        configure_chat(self._base.tokenizer, ChatConfig.model_validate(dict(rendered)))
        self._engine: LocalEngine = LocalEngine(self._base, max_rows=1)
        self._version, self._name = PolicyVersion.base(), Path(policy.model).name
        if policy.run_dir is not None:
            self._name = policy.run_dir.name
        if policy.adapter is not None:
            policy.adapter.check_base(self._base.hash)
            self._version = policy.adapter.version
            self._name = str(self._version)
            with policy.adapter.held():
                self._engine.load(self._version, policy.adapter.directory)

    def close(self) -> None:
        self._engine.close()

    def answer(self, messages: Sequence[Any]) -> tuple[dict[str, Any], str]:
        said: list[ReplyPart] = []
        completion = self._sample(messages, said.append)
        text = joined(said, "content")
        return {
            "text": text,
            "reasoning": joined(said, "reasoning") or None,
            "version": self._name,
            "finish_reason": completion.finish_reason.value,
            "completion_tokens": len(completion.token_ids),
        }, text

    def print_reply(self, messages: Sequence[Any]) -> str:
        said: list[ReplyPart] = []

        def show(part: ReplyPart) -> None:
            if part.kind == "content" and said and said[-1].kind == "reasoning":
                print(file=sys.stderr, flush=True)
            stream = sys.stdout if part.kind == "content" else sys.stderr
            stream.write(visible(part.text))
            stream.flush()
            said.append(part)

        completion = self._sample(messages, show)
        sys.stdout.write("\n")
        _say_who(self._name, cut=completion.finish_reason.value == "length")
        return joined(said, "content")

    def _sample(self, messages: Sequence[Any], hear: Callable[[ReplyPart], object]) -> Completion:
        """Return the next turn; `hear` gets its parts, thoughts and content, while it is sampled."""
        from groupwise.model.chat import encode_prompt, opens_thought
        from groupwise.model.reply_formats.known import format_of
        from groupwise.tasks.reply import TextStream
        from groupwise.tasks.row_images import read_images
        from groupwise.tasks.structured import of_reply
        from groupwise.types import Prompt, SamplingRequest

        tokenizer, context = self._base.tokenizer, self._base.context_length
        seen = tuple(read_images(message, where="the conversation") for message in messages)
        ids = encode_prompt(Prompt(id="chat", messages=seen), tokenizer, context=context).token_ids
        params = of_reply(self._params(len(ids), context), ids, tokenizer)
        tokens: SimpleQueue[int | None] = SimpleQueue()
        request = SamplingRequest(
            prompt_ids=tuple(ids), params=params, version=self._version, interactive=True, cache=True
        )
        (future,) = self._engine.submit([request], on_token=lambda _, token, *rest: tokens.put(token))
        future.add_done_callback(lambda _: tokens.put(None))
        stream = TextStream(tokenizer, params)
        parser = format_of(tokenizer).parser(thinks=opens_thought(ids, tokenizer), calls=False)
        while (token := tokens.get()) is not None:
            for part in parser.push(stream.push(token)):
                hear(part)
        completion = future.result()[0]
        for part in (*parser.push(stream.finish(completion.text)), *parser.finish()):
            hear(part)
        return completion

    def _params(self, prompt: int, context: int) -> SamplingParams:
        """Raise ContextLengthError if the conversation leaves no room for a reply, ConfigError for a wrong option."""
        from groupwise.types import SamplingParams

        if prompt >= context:
            raise ContextLengthError(
                f"the conversation has {prompt} tokens, and the model reads {context}", hint="begin a new conversation"
            )
        given = {key: value for key, value in self._options.items() if value is not None}
        most = min(given.pop("max_tokens", MAX_TOKENS), context - prompt)
        try:
            return SamplingParams(max_tokens=most, **given)
        except ValueError as error:
            raise ConfigError(str(error)) from None
