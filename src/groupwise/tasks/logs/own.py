"""Our own: a run's rollouts (`rollouts/*.jsonl` of its directory), and ratings that a server keeps.

    {"prompt": {..}, "rollouts": [..]}              a group: an exchange each rollout, its reward an outcome
    {"rollout_id": .., "score": .., "correction"}   what people said (`groupwise feedback list --json`): an outcome

A rollout of several turns is one exchange, whose answer is the last thing that the policy said. Columns of the prompt
stay with it, for rewards. Token ids are left out: a log is learned in the words of the model that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import DataError
from groupwise.store.rollouts import group_from_json
from groupwise.tasks.logs.exchange import Exchange, Outcome, Read, outcomes_of, value_of
from groupwise.tasks.logs.messages import conversation
from groupwise.types import FinishReason


class OwnRollouts:
    """The `LogFormat` of our own rollouts."""

    name = "Groupwise's rollouts"

    def knows(self, row: Mapping[str, Any]) -> bool:
        return (isinstance(row.get("prompt"), Mapping) and "rollouts" in row) or (
            "rollout_id" in row and bool({"score", "correction"} & row.keys())
        )

    def read(self, row: Mapping[str, Any], place: str) -> Iterator[Read]:
        if "rollout_id" in row:
            said = {"score": row.get("score"), "correction": row.get("correction")}
            yield from outcomes_of(str(row["rollout_id"]), said.items())
            return
        group = group_from_json(row)
        asked = group.prompt.messages or ({"role": "user", "content": group.prompt.text or ""},)
        for number, rollout in enumerate(group.rollouts):
            if rollout.error is not None or not rollout.turns:
                continue
            id, last = f"{place}.{number}", rollout.turns[-1].completion
            said = rollout.messages or ({"role": "assistant", "content": last.text},)
            ends = [at for at, each in enumerate(said) if each["role"] == "assistant"]
            if not ends:
                raise DataError("a rollout has no message of the policy's")
            whole = conversation([*map(dict, asked), *map(dict, said[: ends[-1] + 1])])
            yield Exchange(
                place=place,
                ids=(id,),
                messages=whole[:-1],
                answer=whole[-1],
                tools=group.prompt.tools,
                cut=last.finish_reason is FinishReason.LENGTH,
                model=str(last.version),
                columns=group.prompt.columns,
            )
            if (reward := value_of("reward", rollout.reward)) is not None:
                yield Outcome(id=id, name="reward", value=reward)

    def finish(self) -> Iterator[Read]:
        return iter(())
