"""Records the calls of an environment's methods: how long each took, and its result or error."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.tasks.env_loading import EnvFactory

METHODS = ("cases", "eval_cases", "reset", "step", "score", "close")


@dataclass(kw_only=True)
class Called:
    """A call of one method: `seconds` is None until it returns, for ever if it hangs; `error` is what it raised."""

    method: str
    seconds: float | None = None
    error: str | None = None


@dataclass
class Watch:
    """The calls so far, in the order in which they began."""

    calls: list[Called] = field(default_factory=list)

    def of(self, factory: EnvFactory) -> EnvFactory:
        """Return the same environment, watched. What refuses new attributes (slots) is watched while it is made
        only."""
        make = self._timed("__init__", factory.make_one)

        def watched(**args: Any) -> Any:
            instance = make(**args)
            for name in METHODS:
                if callable(method := getattr(instance, name, None)):
                    with suppress(AttributeError, TypeError):
                        object.__setattr__(instance, name, self._timed(name, method))
            return instance

        return replace(factory, make_one=watched)

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function`'s result, and count its time for method `name`."""
        return self._timed(name, function)(*args, **kwargs)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def begin() -> tuple[Called, float]:
            self.calls.append(called := Called(method=name))
            return called, time.monotonic()

        def end(called: Called, started: float, error: BaseException | None = None) -> None:
            called.seconds = time.monotonic() - started
            called.error = None if error is None else f"{type(error).__name__}: {error}"

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waited(*args: Any, **kwargs: Any) -> Any:
                called, started = begin()
                try:
                    result = await function(*args, **kwargs)
                except Exception as error:
                    end(called, started, error)
                    raise
                end(called, started)
                return result

            return waited

        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            called, started = begin()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                end(called, started, error)
                raise
            end(called, started)
            return result

        return timed
