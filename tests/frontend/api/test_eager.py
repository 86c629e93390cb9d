"""What runs at once and what becomes a task."""

import asyncio

import pytest
from engine.frontend.api.eager import run_until_wait


async def append(done: list[str], gate: asyncio.Event | None = None, fails: bool = False) -> None:
    done.append("begun")
    if gate is not None:
        await gate.wait()
    if fails:
        raise ValueError("at the end")
    done.append("ended")


def test_what_need_not_wait_is_done_on_return() -> None:
    async def main() -> None:
        done: list[str] = []
        assert run_until_wait(append(done)) is None
        assert done == ["begun", "ended"]

    asyncio.run(main())


def test_what_waits_goes_on_as_a_task() -> None:
    async def main() -> None:
        gate, done = asyncio.Event(), list[str]()
        task = run_until_wait(append(done, gate))
        assert task is not None
        assert done == ["begun"]
        gate.set()
        await task
        assert done == ["begun", "ended"]

    asyncio.run(main())


def test_errors_come_from_where_it_runs() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="at the end"):
            run_until_wait(append([], fails=True))
        gate = asyncio.Event()
        task = run_until_wait(append([], gate, fails=True))
        assert task is not None
        gate.set()
        with pytest.raises(ValueError, match="at the end"):
            await task

    asyncio.run(main())


def test_a_cancelled_rest_does_not_run() -> None:
    async def main() -> None:
        gate, done = asyncio.Event(), list[str]()
        task = run_until_wait(append(done, gate))
        assert task is not None
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await asyncio.sleep(0)
        assert done == ["begun"]

    asyncio.run(main())
