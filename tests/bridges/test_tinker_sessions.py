"""Sessions of the Tinker wire that no client is heard of: they end, whatever the end of another one meets."""

import asyncio

from groupwise.bridges.tinker.sessions import Sessions


def test_silent_sessions_end_although_the_end_of_one_fails() -> None:
    async def all_end() -> list[str]:
        ended, last = list[str](), asyncio.Event()

        async def end(id: str) -> None:
            ended.append(id)
            if len(ended) == 1:
                raise ValueError("not expected")
            last.set()

        sessions = Sessions(idle_s=0.01, ended=end)
        made = [sessions.create().id for _ in range(2)]
        async with asyncio.timeout(10):
            await last.wait()
        sessions.close()
        assert ended == made
        return sessions.ids

    assert asyncio.run(all_end()) == []
