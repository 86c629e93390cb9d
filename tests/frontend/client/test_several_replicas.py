"""Requests of the engine client to several replicas."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from engine.frontend.client.engine_client import EngineClient, ReplicaUnavailable
from engine.frontend.client.replicas import moves
from engine.protocol.arrays import int32_bytes, uint64_bytes
from engine.protocol.block_hash import HASH_BYTES, adapter_key, block_keys, hash_blocks, root_hash
from engine.protocol.config import FIRST_EPOCH, KVTransferConfig, ParallelConfig
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.kv_transfer.direct import request_name
from engine.protocol.messages import AbortRequests, ReplicaLoadUpdate
from engine.protocol.routing.choice import HEADROOM
from engine.protocol.supervisor_messages import ReplicaState
from msgspec.structs import replace
from support.requests.client_requests import PROMPT, request
from support.servers.echo_core import EchoCore
from support.servers.engine_fixtures import (
    drive,
    engine_config,
    on_event_loop,
    opened,
    read_next,
    smollm2_tokenizer,
    until,
)
from support.servers.two_replicas import TwoReplicas

pytestmark = pytest.mark.slow


@on_event_loop
async def test_sequences_move_to_another_replica_if_theirs_is_delayed(tmp_path: Path) -> None:
    replicas = TwoReplicas(tmp_path)
    cores, client = replicas.cores, await replicas.start()
    resuming, gone = (
        [replicas.info(0, epoch=FIRST_EPOCH + 1, is_resuming=is_resuming), replicas.info(1)]
        for is_resuming in (True, False)
    )
    group = await client.submit([request(40)], request_id="r")
    await replicas.arrived(1, 0)
    [(_, begun)] = await drive(cores[0], read_next(group))
    cores.pop(0).close()
    await replicas.publish_until(resuming, lambda: not client.cores[0].ready)
    assert not cores[0].requests
    await replicas.publish_until(gone, lambda: bool(cores[0].requests))
    [rest] = await drive(cores[0], group.result())
    assert begun.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]
    assert client.ready and client.num_inflight == 0


@on_event_loop
async def test_sequences_of_a_draining_replica_move_and_name_where_their_blocks_are(
    tmp_path: Path,
) -> None:
    replicas = TwoReplicas(tmp_path, kv_transfer=KVTransferConfig("direct"))
    cores, client = replicas.cores, await replicas.start()
    proxied = replace(request(40), kv_transfer_params={"do_remote_decode": True})
    group = await client.submit([replace(request(40), data_parallel_rank=0)], request_id="moves")
    await client.submit([replace(proxied, data_parallel_rank=0)], request_id="stays")
    await replicas.arrived(2, 0)
    [(_, begun)] = await drive(cores[0], read_next(group))
    (first, *_) = cores[0].requests
    draining = [replicas.info(0, state=ReplicaState.DRAINING), replicas.info(1)]
    await replicas.publish_until(draining, lambda: bool(cores[1].requests))
    await replicas.arrived(1, 1)
    assert [each.are_moved for each in aborts_at(cores[0])] == [True]
    (moved,) = cores[1].requests
    assert moved.kv_transfer_params == {
        "do_remote_prefill": True,
        "replica": 0,
        "replica_epoch": FIRST_EPOCH,
        "remote_request_id": request_name(0, first.request_index, first.arrival_time),
    }
    [rest] = await drive(cores[1], group.result())
    # It has run, so its fetch has ended, and its blocks are not held anymore.
    await until(lambda: len(aborts_at(cores[0])) == 2, cores[0].receive)
    assert aborts_at(cores[0])[1] == AbortRequests(int32_bytes([first.request_index]))
    assert begun.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]


@pytest.mark.parametrize(
    ("stuck", "is_drained"), [({"silent_s": 9.0}, False), ({"busy_s": 99.0}, False), ({}, True)]
)
@on_event_loop
async def test_waiting_sequences_leave_a_replica_that_is_stuck_or_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: dict[str, float], is_drained: bool
) -> None:
    monkeypatch.setattr(moves, "LOOK_S", 0.02)
    replicas = TwoReplicas(tmp_path)
    cores, client = replicas.cores, await replicas.start()
    both = [replicas.info(0), replicas.info(1)]
    await replicas.publish_until([both[0], replicas.info(1, state=ReplicaState.DRAINED)])
    pinned = replace(request(40), data_parallel_rank=0)
    running = await client.submit([request(40)], request_id="runs")
    await replicas.arrived(1, 0)
    [(_, begun)] = await drive(cores[0], read_next(running))
    waiting = [await client.submit([request(5)], request_id=f"waits {n}") for n in range(3)]
    if not is_drained:
        waiting.append(await client.submit([pinned], request_id="may not leave"))
    await replicas.arrived(4 + (not is_drained), 0)
    cores[0].report_queued()
    replicas.processes = [replicas.worker(0, **stuck), replicas.worker(1)]
    left = replicas.info(0, state=ReplicaState.DRAINING) if is_drained else both[0]
    await replicas.publish_until([left, both[1]], lambda: len(cores[1].requests) == 3)
    assert not any(each.kv_transfer_params for each in cores[1].requests)
    await client.submit([request(5)], request_id="new")
    await replicas.arrived(1 + (not is_drained), 4)
    replicas.processes = []
    await replicas.publish_until(both)
    results = asyncio.ensure_future(asyncio.gather(*(group.result() for group in waiting)))
    await until(results.done, lambda: [drive_once(core) for core in cores])
    for number, (delta,) in enumerate(results.result()):
        count = 5 if number < 3 else 40
        assert delta.token_ids == [PROMPT[i % len(PROMPT)] for i in range(count)]
    assert not any(group.sequences[0].recoveries for group in waiting)
    [rest] = await drive(cores[0], running.result())
    assert begun.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]


def aborts_at(core: EchoCore) -> list[AbortRequests]:
    return [message for message in core.received if isinstance(message, AbortRequests)]


def drive_once(core: EchoCore) -> None:
    core.receive()
    if core.requests:
        core.step()


@on_event_loop
async def test_sequences_leave_a_replica_whose_load_stays_too_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "LOOK_S", 0.02)
    monkeypatch.setattr(moves, "PATIENCE_S", 0.1)
    replicas = TwoReplicas(tmp_path, kv_transfer=KVTransferConfig("direct"))
    cores, client = replicas.cores, await replicas.start()
    drained = [replicas.info(0), replicas.info(1, state=ReplicaState.DRAINED)]
    await replicas.publish_until(drained, lambda: not client.cores[1].is_serving)
    pinned = replace(request(40), data_parallel_rank=0)
    groups = [
        await client.submit([pinned if number == 0 else request(40)], request_id=str(number))
        for number in range(12)
    ]
    await replicas.arrived(12, 0)
    # A token of each shows that the core has accepted it.
    begun = [(await drive(cores[0], read_next(group)))[0][1] for group in groups]
    await replicas.publish_until([replicas.info(0), replicas.info(1)])
    # Then replica 0 has the maximum number of additional requests that its cached blocks justify.
    await until(lambda: [core.load.total for core in client.cores] == [8, 4], replicas.receive)
    await replicas.arrived(8, 4)
    rests = asyncio.ensure_future(asyncio.gather(*(group.result() for group in groups)))
    await until(rests.done, lambda: [drive_once(core) for core in cores])
    assert groups[0].sequences[0].core_index == 0
    for first, (rest,) in zip(begun, rests.result(), strict=True):
        assert first.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]


@on_event_loop
async def test_prompts_are_balanced_and_all_sequences_of_one_use_one_replica(
    tmp_path: Path,
) -> None:
    replicas = TwoReplicas(tmp_path)
    client = await replicas.start()
    for i in range(4):
        await client.submit([request()], request_id=str(i))
    await replicas.arrived(2, 2)
    await client.submit([request()] * 3, request_id="n=3")
    await client.submit([request()], request_id="alone")
    await replicas.arrived(5, 3)
    batch = [request(prompt=list(PROMPT)) for _ in range(4)]
    await client.submit(batch, request_id="four prompts")
    await replicas.arrived(6, 6)


@on_event_loop
async def test_a_restarted_frontend_serves_with_the_replicas_that_are_up(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH + 1, parallel=parallel)
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    cores = [opened(EchoCore(config, 1))]
    starting = asyncio.ensure_future(client.start())
    await until(starting.done, cores[0].receive)
    assert client.ready
    group = await client.submit([request(3)], request_id="r")
    [delta] = await drive(cores[0], group.result())
    assert delta.token_ids == PROMPT[:3]
    cores.append(opened(EchoCore(config, 0)))
    await until(lambda: bool(cores[1].received), cores[1].receive)
    late = replace(request(3), data_parallel_rank=0)
    [delta] = await drive(cores[1], (await client.submit([late], request_id="late")).result())
    assert delta.token_ids == PROMPT[:3]


@on_event_loop
async def test_prompts_go_to_their_cached_prefix_but_not_to_a_drained_replica(
    tmp_path: Path,
) -> None:
    replicas = TwoReplicas(tmp_path)
    client, block_size = await replicas.start(), replicas.config.cache.block_size
    prompt = list(range(100, 100 + 3 * block_size))
    keys = uint64_bytes(
        block_keys(hash_blocks(np.array(prompt, np.int32), block_size, root_hash()))
    )
    await replicas.report(1, ReplicaLoadUpdate(0, keys))
    for _ in range(3):
        await client.submit([request(prompt=prompt)], request_id="its prefix is at 1")
    await replicas.arrived(0, 3)
    await client.submit([request()], request_id="another prompt")
    await replicas.arrived(1, 3)
    await replicas.report(1, ReplicaLoadUpdate(20, removed=keys))
    await replicas.report(0, ReplicaLoadUpdate(5))
    for _ in range(4):
        await client.submit([request()], request_id="others have more at 1")
    await replicas.arrived(5, 3)
    await client.submit([replace(request(), data_parallel_rank=1)], request_id="by name")
    await replicas.arrived(5, 4)
    await replicas.publish_until([replicas.info(0, state=ReplicaState.DRAINING), replicas.info(1)])
    await client.submit([request()], request_id="0 is drained")
    await replicas.arrived(5, 5)
    with pytest.raises(ReplicaUnavailable, match="replica 0"):
        await client.submit([replace(request(), data_parallel_rank=0)], request_id="by name")
    await replicas.publish_until([replicas.info(0, is_up=False), replicas.info(1)])
    await client.submit([request()], request_id="0 is down")
    await replicas.arrived(5, 6)


@on_event_loop
async def test_requests_wait_while_no_replica_accepts_them(tmp_path: Path) -> None:
    replicas = TwoReplicas(tmp_path)
    cores, client = replicas.cores, await replicas.start()
    cores.pop().close()
    await replicas.publish_until(
        [
            replicas.info(0, state=ReplicaState.DRAINED),
            replicas.info(1, epoch=FIRST_EPOCH + 1, is_up=False),
        ]
    )
    assert not client.ready
    for _ in range(2):
        await client.submit([request()], request_id="waits")
    cores.append(opened(EchoCore(replicas.config, 1, epoch=FIRST_EPOCH + 1)))
    await replicas.arrived(0, 2)


@on_event_loop
async def test_requests_go_to_a_replica_with_their_adapter_until_it_is_too_busy(
    tmp_path: Path,
) -> None:
    replicas = TwoReplicas(tmp_path)
    client = await replicas.start()
    held, new = (
        LoraAdapter(name, "", bytes([number] * HASH_BYTES)) for name, number in (("a", 2), ("b", 3))
    )

    async def submit(lora: LoraAdapter, count: int, *expected: int) -> None:
        for _ in range(count):
            await client.submit([replace(request(), lora=lora)], request_id=lora.name)
        await replicas.arrived(*expected)

    # Without a report, a would go to the first replica and b to the second.
    key = uint64_bytes([adapter_key(held.version)])
    await replicas.report(1, ReplicaLoadUpdate(0, stored=key))
    await submit(held, HEADROOM, 0, HEADROOM)
    await submit(new, 1, 1, HEADROOM)
    await submit(held, 3, 2, HEADROOM + 2)
