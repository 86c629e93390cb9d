"""Objects are stored for their owner, in order, within limits, and survive the store process if there is a file."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.frontend.store.client import StoreClient, StoreError, UnknownObject
from engine.protocol.config import EngineConfig, StoreConfig
from support.servers.engine_fixtures import engine_config, on_event_loop, opened
from support.servers.store_thread import StoreThread

MEBI = 1 << 20


def config_of(run_dir: Path, **store: Any) -> EngineConfig:
    return engine_config(run_dir, store=StoreConfig(**store))


async def connect(config: EngineConfig, client_index: int = 0) -> StoreClient:
    client = opened(StoreClient(config, client_index))
    client.start()
    assert await client.wait_until_connected(10)
    return client


async def ids_of(client: StoreClient, **wanted: Any) -> tuple[list[str], bool]:
    page = await client.list("item", owner="a", **wanted)
    return [each.object_id for each in page.objects], page.has_more


@on_event_loop
async def test_objects_exist_for_their_owner_only(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with StoreThread(config):
        client, other = await connect(config), await connect(config, 1)
        await client.put("response", "r1", b"one", owner="a", parent="c")
        await client.put("response", "r1", b"of b", owner="b")
        found = await other.get("response", "r1", owner="a")
        assert found is not None and (found.data, found.parent) == (b"one", "c")
        assert await other.get("response", "r1", owner="c") is None
        assert await other.get("file", "r1", owner="a") is None
        assert not await other.delete("response", "r1", owner="c")
        await client.put("response", "r1", b"changed", owner="a", parent="c")
        changed = await other.get("response", "r1", owner="a")
        assert changed is not None and changed.data == b"changed"
        assert changed.created_at == found.created_at
        assert await other.delete("response", "r1", owner="a")
        assert not await other.delete("response", "r1", owner="a")
        kept = await other.get("response", "r1", owner="b")
        assert kept is not None and kept.data == b"of b"


@on_event_loop
async def test_lists_are_pages_in_the_order_of_creation(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with StoreThread(config):
        client = await connect(config)
        for number in range(7):
            await client.put("item", f"i{number}", b"", owner="a", parent=f"p{number % 2}")
        await client.put("item", "i1", b"again", owner="a", parent="p1")
        await client.put("item", "x", b"", owner="b", parent="p0")
        assert await ids_of(client) == ([f"i{n}" for n in range(7)], False)
        assert await ids_of(client, parent="p1", limit=2) == (["i1", "i3"], True)
        assert await ids_of(client, parent="p1", limit=2, after="i3") == (["i5"], False)
        assert await ids_of(client, order="desc", limit=2) == (["i6", "i5"], True)
        assert await ids_of(client, order="desc", after="i1") == (["i0"], False)
        with pytest.raises(UnknownObject):
            await ids_of(client, after="x")
        assert await client.delete_children("item", "p1", owner="a") == 3
        assert await ids_of(client) == (["i0", "i2", "i4", "i6"], False)


@pytest.mark.parametrize("set_back_s", [0, 86400])
@on_event_loop
async def test_the_oldest_objects_make_room(
    tmp_path: Path, set_back_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the clock of the system is set back."""
    now = time.time
    config = config_of(tmp_path, max_bytes=MEBI)
    with StoreThread(config):
        client = await connect(config)
        with pytest.raises(StoreError, match="too much for a store of 1048576 bytes"):
            await client.put("item", "large", bytes(MEBI), owner="a")
        for number in range(40):
            if number == 5:
                monkeypatch.setattr(time, "time", lambda: now() - set_back_s)
            await client.put("item", f"i{number}", bytes(100_000), owner="a")
        kept, _ = await ids_of(client)
        assert 8 <= len(kept) <= 10
        assert kept[-1] == "i39" and kept == [f"i{n}" for n in range(40 - len(kept), 40)]


@pytest.mark.slow
@on_event_loop
async def test_objects_expire_after_their_time(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_age_s=1)
    with StoreThread(config) as store:
        client = await connect(config)
        await client.put("item", "old", b"", owner="a")
        store.__exit__()
        await asyncio.sleep(1.01)
        # A store searches for old objects when it starts: objects in a file are kept, and objects in memory are lost
        # anyway.
        store.__enter__()
        assert await ids_of(client) == ([], False)


@pytest.mark.parametrize("is_file", [True, False])
@on_event_loop
async def test_a_crash_loses_only_what_was_in_memory(tmp_path: Path, is_file: bool) -> None:
    path = str(tmp_path / "store.db") if is_file else None
    config = config_of(tmp_path, path=path)
    with StoreThread(config) as store:
        client = await connect(config)
        await client.put("item", "before", b"1", owner="a")
        store.__exit__()
        # A call without a store waits for the next one.
        waiting = asyncio.ensure_future(client.put("item", "between", b"2", owner="a"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        store.__enter__()
        await waiting
        assert await ids_of(client) == (["before", "between"] if is_file else ["between"], False)


@on_event_loop
async def test_store_answers_many_concurrent_calls(tmp_path: Path) -> None:
    config = config_of(tmp_path, path=str(tmp_path / "store.db"))
    with StoreThread(config):
        client = await connect(config)
        names = [f"i{number}" for number in range(600)]
        await asyncio.gather(*(client.put("item", name, b"x", owner="a") for name in names))
        assert await ids_of(client, limit=1000) == (names, False)


def test_messages_of_the_store_are_small() -> None:
    """A put message is little larger than its data, regardless of the field names."""
    from engine.protocol.store.messages import PutObject

    assert len(msgspec.msgpack.encode(PutObject(1, "item", "i", "", bytes(1000)))) < 1050
