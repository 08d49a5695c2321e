"""aitraining's three-method environments, unchanged; their scoring method plays the whole episode itself.

    class HotelEnv:
        def __init__(self, difficulty="easy"): ...                            the arguments come from `env.args`
        def build_dataset(self, tokenizer): ...                               rows with `prompt` and `case_idx`
        def score_episode(self, model, tokenizer, completion, case_idx): ...  -> the reward, 0 to 1
        def get_tools(self): ...                                              optional: for the chat template

One instance makes the dataset, and what it keeps of it is there when episodes are scored. Episodes run at once in
threads, so each has a shallow copy (`copy.copy`) of that instance: what it assigns to `self` stays its own. With
`env.concurrency: 1` they run one after another on the one instance, as they do there.

`tokenizer` is the model's, padding on the left and with a padding token, as there; calls of it wait for each other.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from groupwise.config.run import EnvConfig
from groupwise.errors import ConfigError, DataError, EnvError
from groupwise.model.chat import RENDERING
from groupwise.platform import run_coroutine
from groupwise.tasks.env import reward_of
from groupwise.tasks.env_kind import warn
from groupwise.tasks.env_loading import EnvFactory
from groupwise.tasks.prompts import to_prompt
from groupwise.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CASE = "case_idx"

SCORED_WITH = ("model", "tokenizer", "completion", CASE)

NOT_HERE = ("workers", "max_tool_calls", "step_timeout_s", "max_characters", "stop_at_cut")

"""Keys that mean nothing to `score_episode`, which is one call, with the model as an object of this process."""


class LegacyEnv:
    """An environment of three methods with what belongs to it: its one instance, the tokenizer, its tools.

    Raises ConfigError for a scorer that takes other arguments and for options that have no meaning here, EnvError for
    what its code raises.
    """

    def __init__(
        self,
        factory: EnvFactory,
        config: EnvConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        note: Callable[[str], None] | None = None,
    ):
        for key in config.differing(NOT_HERE):
            raise ConfigError(f"env.{key} does nothing for {factory.name}, which decides that itself; leave it out")
        self.name, self.config = factory.name, config
        self.tokenizer = for_user_code(tokenizer)
        self._note = warn if note is None else note
        self._instance = factory.make()
        _check_scorer(self._instance, self.name)
        self.tools = self._tools()

    def cases(self, *, held_out: bool = False) -> list[Prompt] | None:
        """Return what `build_dataset` returns, or `build_eval_dataset`, a method of ours; None without it. Call it
        once.

        Raises DataError for rows that cannot be used.
        """
        method = "build_eval_dataset" if held_out else "build_dataset"
        if not callable(getattr(self._instance, method, None)):
            return None
        rows = self._call(method, self.tokenizer)
        prompts = list(self._prompts(rows, f"{self.name}.{method}", numbered=not held_out))
        if not held_out and self.tools and any(prompt.messages is None for prompt in prompts):
            self._note(f"{self.name}: its tools do not go into prompts that are texts; they do into lists of messages")
        return prompts

    def check(self, prompts: Sequence[Prompt], source: str) -> list[Prompt]:
        """Return prompts of another source, with the tools. Raises DataError for one that names no case."""
        return [self._with_tools(_of_a_case(_as_text(prompt), source)) for prompt in prompts]

    def instance(self) -> Any:
        """Return an instance for one episode. Raises EnvError where it cannot be copied."""
        if self.config.concurrency == 1:
            return self._instance
        try:
            return copy.copy(self._instance)
        except Exception as error:
            raise EnvError(
                f"{self.name} cannot be copied for an episode: {type(error).__name__}: {error}",
                field=self.name,
                hint="write __copy__, or set env.concurrency: 1",
            ) from error

    def score(self, instance: Any, *, model: Any, completion: Any, case: Any) -> float | None:
        """Run `score_episode`; None is what it may say where there is nothing to score.

        Raises the method's errors, and EnvError for a result that is not a number.
        """
        given = dict(zip(SCORED_WITH, (model, self.tokenizer, completion, case), strict=True))
        value = _finished(instance.score_episode(**given))
        return None if value is None else reward_of(value, f"{self.name}.score_episode")

    def _prompts(self, rows: Any, source: str, *, numbered: bool) -> Iterator[Prompt]:
        """Yield rows as prompts that name their case; where none does, with `numbered`, the number of its row."""
        listed = list(_rows(rows, source))
        missing = not any(CASE in row for row in listed)
        if missing and numbered:
            self._note(f"{source}: no column {CASE!r}; the number of its row is a prompt's case")
        for number, row in enumerate(listed):
            if row.get("prompt") is None:
                held = ", ".join(map(repr, row)) or "no columns"
                raise DataError(f"{source}: row {number} has no 'prompt'; it has {held}", hint="a text, or messages")
            row = row | {CASE: number} if missing and numbered else row
            yield self._with_tools(
                _of_a_case(to_prompt(row, id=f"case:{number}", prompt_key="prompt", raw=True), source)
            )

    def _with_tools(self, prompt: Prompt) -> Prompt:
        return prompt if prompt.messages is None or prompt.tools else replace(prompt, tools=self.tools)

    def _tools(self) -> tuple[dict[str, Any], ...]:
        if not callable(getattr(self._instance, "get_tools", None)):
            return ()
        tools = self._call("get_tools") or ()
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) and tool for tool in tools):
            method, hint = f"{self.name}.get_tools", "return a list of tools in OpenAI's form"
            raise EnvError(f"{method} returned {tools!r}", hint=hint, field=method)
        return tuple(dict(tool) for tool in tools)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return _finished(getattr(self._instance, method)(*args))
        except Exception as error:
            raise EnvError.raised(f"{self.name}.{method}", error) from error


def for_user_code(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy with the padding that GRPO wants. Its calls wait for each other: padding is a state that it
    keeps."""
    own, lock = copy.deepcopy(tokenizer), threading.RLock()
    kind: Any = type(own)

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return kind._encode_plus(self, *args, **kwargs)

    def render(self: Any, *args: Any, **kwargs: Any) -> Any:
        with RENDERING:
            return kind.apply_chat_template(self, *args, **kwargs)

    methods = {"_encode_plus": encode, "apply_chat_template": render, "__module__": kind.__module__}
    own.__class__ = type(kind.__name__, (kind,), methods)
    own.padding_side = "left"
    if own.pad_token is None:
        own.pad_token = own.eos_token
    return own


def _rows(value: Any, source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset`, or of a list. Raises DataError."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        hint = "return a datasets.Dataset or a list of objects with a prompt; of a DatasetDict one split"
        raise DataError(f"{source} returned a {type(value).__name__}", hint=hint)
    number = -1
    for number, row in enumerate(value):
        if not isinstance(row, Mapping):
            raise DataError(f"{source}: row {number} is {row!r}; a row is an object, its columns by name")
        yield dict(row)
    if number < 0:
        raise DataError(f"{source} returned no rows", hint="return at least one prompt")


def _as_text(prompt: Prompt) -> Prompt:
    """Return a prompt that is a string in its row is one for these environments, which render their prompts
    themselves."""
    return prompt if prompt.text is None else replace(prompt, messages=None)


def _of_a_case(prompt: Prompt, source: str) -> Prompt:
    if prompt.columns.get(CASE) is None:
        raise DataError(f"{source}: {prompt.id} has no {CASE!r}", hint=f"add the column {CASE}, the number of the case")
    return prompt


def _check_scorer(instance: Any, name: str) -> None:
    try:
        inspect.signature(instance.score_episode).bind(**dict.fromkeys(SCORED_WITH))
    except TypeError as error:
        takes = inspect.signature(instance.score_episode)
        raise ConfigError(
            f"{name}.score_episode{takes} cannot be called with {', '.join(SCORED_WITH)}: {error}",
            hint=f"write def score_episode(self, {', '.join(SCORED_WITH)})",
        ) from None
    except ValueError:  # no signature to look at
        return


def _finished(value: Any) -> Any:
    """Return what an async method returns."""

    async def waited() -> Any:
        return await value

    return run_coroutine(waited()) if inspect.isawaitable(value) else value
