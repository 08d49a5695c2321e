"""Exports of LangSmith: runs, and what was said of them.

    {"run_type": "llm", "trace_id": .., "inputs": {..}, "outputs": {..}}   a run; those of other types are passed over
    {"run_id": .., "key": .., "score": .., "correction": ..}               feedback: an outcome, by its key

`inputs` and `outputs` are LangChain's (`messages`, `generations`) or those of a wrapped client of OpenAI's or
Anthropic's. User and conversation stand in the run's metadata: `session_id`, `thread_id`, `conversation_id`, `user_id`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import DataError
from groupwise.tasks.logs.exchange import Exchange, Outcome, Read, first, parsed, seconds, text_at, value_of, worded
from groupwise.tasks.logs.messages import answer_in, conversation, tools_in
from groupwise.types import Message

METADATA = ("extra.metadata", "metadata")
CONVERSATION = ("session_id", "thread_id", "conversation_id")
USER = ("user_id", "user", "userId")


class LangSmith:
    """The `LogFormat` of LangSmith's exports."""

    name = "LangSmith"

    def knows(self, row: Mapping[str, Any]) -> bool:
        return ("run_type" in row and "inputs" in row) or ("run_id" in row and "key" in row)

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        if "key" in row and "run_id" in row:
            yield from _feedback(str(row["run_id"]), str(row["key"]), row)
            return
        id = text_at(row, "id", "run_id") or place
        for key, stats in (row.get("feedback_stats") or {}).items():
            if isinstance(stats, Mapping) and (value := value_of(key, stats.get("avg"))) is not None:
                yield Outcome(id=id, name=key, value=value)
        if row["run_type"] != "llm":
            return
        if row.get("error"):
            raise DataError(f"the run failed: {row['error']!r:.80}")
        inputs, outputs = parsed(row["inputs"]), parsed(row.get("outputs"))
        if not outputs:
            raise DataError("the run has no outputs")
        metadata = first(row, *METADATA) or {}
        invocation = first(row, "extra.invocation_params") or {}
        tools = (inputs.get("tools") if isinstance(inputs, Mapping) else None) or invocation.get("tools")
        yield Exchange(
            place=place,
            ids=(id,),
            messages=_asked(inputs),
            answer=_said(outputs),
            tools=tools_in(tools),
            time=seconds(row.get("start_time")),
            user=text_at(metadata, *USER),
            conversation=text_at(metadata, *CONVERSATION),
            trace=text_at(row, "trace_id"),
            model=text_at(metadata, "ls_model_name") or text_at(invocation, "model", "model_name"),
        )

    def finish(self) -> Iterator[Read]:
        return iter(())


def _asked(inputs: Any) -> tuple[Message, ...]:
    """Return what the model saw; LangChain's models of text alone have `prompts`."""
    if isinstance(inputs, Mapping) and isinstance(inputs.get("prompts"), list) and "messages" not in inputs:
        return conversation(str(inputs["prompts"][0]))
    system = inputs.get("system") if isinstance(inputs, Mapping) else None
    head = conversation([{"role": "system", "content": system}]) if system else ()
    return (*head, *conversation(inputs))


def _said(outputs: Any) -> Message:
    held = outputs.get("output") if isinstance(outputs, Mapping) else None
    return answer_in(held if isinstance(held, Mapping | str) and held else outputs)


def _feedback(id: str, key: str, row: Mapping[str, Any]) -> Iterator[Outcome]:
    rating = text_at(row, "id")
    given = row.get("score") if row.get("score") is not None else row.get("value")
    if (value := value_of(key, given)) is not None:
        yield Outcome(id=id, name=key, value=value, rating=rating)
    correction = row.get("correction")
    if isinstance(correction, Mapping):
        correction = first(correction, "output", "text", "content", "answer", "desired")
    correction = worded(correction)
    if isinstance(correction, str) and correction.strip():
        yield Outcome(id=id, name="edited", edited=correction, rating=rating)
