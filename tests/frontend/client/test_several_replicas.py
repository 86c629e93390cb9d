"""Requests of the engine client to several replicas."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from engine.frontend.client.engine_client import EngineClient, ReplicaUnavailable
from engine.frontend.client.replicas.routing import HEADROOM
from engine.protocol.arrays import uint64_bytes
from engine.protocol.block_hash import HASH_BYTES, adapter_key, block_keys, hash_blocks, root_hash
from engine.protocol.config import FIRST_EPOCH, ParallelConfig
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.messages import ReplicaLoadUpdate
from engine.protocol.supervisor_messages import EngineStatus, ReplicaInfo, ReplicaState
from engine.protocol.transport import StatusPublisher
from support.client_requests import PROMPT, request
from support.echo_core import EchoCore
from support.engine_fixtures import (
    drive,
    engine_config,
    on_event_loop,
    opened,
    read_next,
    smollm2_tokenizer,
    until,
)

pytestmark = pytest.mark.slow


@on_event_loop
async def test_sequences_move_to_another_replica_if_theirs_is_delayed(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        epochs = config.epoch + 1, config.epoch
        resuming, gone = (
            EngineStatus(
                [],
                [
                    ReplicaInfo(i, ReplicaState.SERVING, epoch, 0, 0, is_resuming and i == 0)
                    for i, epoch in enumerate(epochs)
                ],
            )
            for is_resuming in (True, False)
        )

        def receive() -> None:
            for core in cores:
                core.receive()

        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        group = await client.submit([request(40)], request_id="r")
        await until(lambda: len(cores[0].requests) == 1, receive)
        [(_, begun)] = await drive(cores[0], read_next(group))
        cores.pop(0).close()
        await until(
            lambda: not client.cores[0].ready, lambda: (publisher.publish(resuming), receive())
        )
        assert not cores[0].requests
        await until(lambda: bool(cores[0].requests), lambda: (publisher.publish(gone), receive()))
        [rest] = await drive(cores[0], group.result())
        assert begun.token_ids + rest.token_ids == [PROMPT[i % len(PROMPT)] for i in range(40)]
        assert client.ready and client.num_inflight == 0
        publisher.close()


@on_event_loop
async def test_prompts_are_balanced_and_all_sequences_of_one_use_one_replica(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))

    def receive() -> None:
        for core in cores:
            core.receive()

    starting = asyncio.ensure_future(client.start())
    await until(starting.done, receive)
    starting.result()
    for i in range(4):
        await client.submit([request()], request_id=str(i))
    await until(lambda: [len(core.requests) for core in cores] == [2, 2], receive)
    await client.submit([request()] * 3, request_id="n=3")
    await client.submit([request()], request_id="alone")
    await until(lambda: [len(core.requests) for core in cores] == [5, 3], receive)
    batch = [request(prompt=list(PROMPT)) for _ in range(4)]
    await client.submit(batch, request_id="four prompts")
    await until(lambda: [len(core.requests) for core in cores] == [6, 6], receive)


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
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    prompt = list(range(100, 100 + 3 * config.cache.block_size))
    hashes = hash_blocks(np.array(prompt, np.int32), config.cache.block_size, root_hash())

    def receive() -> None:
        for core in cores:
            core.receive()

    async def arrived(*counts: int) -> None:
        await until(lambda: tuple(len(core.requests) for core in cores) == counts, receive)

    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        cores[1].hub.send(b"client0", ReplicaLoadUpdate(0, uint64_bytes(block_keys(hashes))))
        answer = asyncio.ensure_future(client.reset_prefix_cache())
        await until(answer.done, receive)
        for _ in range(3):
            await client.submit([request(prompt=prompt)], request_id="its prefix is at 1")
        await arrived(0, 3)
        await client.submit([request()], request_id="another prompt")
        await arrived(1, 3)
        cores[1].hub.send(
            b"client0", ReplicaLoadUpdate(20, removed=uint64_bytes(block_keys(hashes)))
        )
        cores[0].hub.send(b"client0", ReplicaLoadUpdate(5))
        answer = asyncio.ensure_future(client.reset_prefix_cache())
        await until(answer.done, receive)
        for _ in range(4):
            await client.submit([request()], request_id="others have more at 1")
        await arrived(5, 3)
        await client.submit([replace(request(), data_parallel_rank=1)], request_id="by name")
        await arrived(5, 4)
        states = ReplicaState.DRAINING, ReplicaState.SERVING
        infos = [ReplicaInfo(i, state, config.epoch, 0, 0) for i, state in enumerate(states)]
        drained = EngineStatus([], infos)
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == infos,
            lambda: (publisher.publish(drained), receive()),
        )
        await client.submit([request()], request_id="0 is drained")
        await arrived(5, 5)
        with pytest.raises(ReplicaUnavailable, match="replica 0"):
            await client.submit([replace(request(), data_parallel_rank=0)], request_id="by name")
        downs = [
            ReplicaInfo(i, ReplicaState.SERVING, config.epoch, 0, 0, is_up=i == 1) for i in (0, 1)
        ]
        down = EngineStatus([], downs)
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == downs,
            lambda: (publisher.publish(down), receive()),
        )
        await client.submit([request()], request_id="0 is down")
        await arrived(5, 6)
        publisher.close()


@on_event_loop
async def test_requests_wait_while_no_replica_accepts_them(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))

    def receive() -> None:
        for core in cores:
            core.receive()

    with zmq.Context() as context:
        publisher = StatusPublisher(context, config)
        starting = asyncio.ensure_future(client.start())
        await until(starting.done, receive)
        cores.pop().close()
        infos = [
            ReplicaInfo(0, ReplicaState.DRAINED, config.epoch, 0, 0),
            ReplicaInfo(1, ReplicaState.SERVING, config.epoch + 1, 0, 0, is_up=False),
        ]
        await until(
            lambda: client.watch is not None and client.watch.status.replicas == infos,
            lambda: (publisher.publish(EngineStatus([], infos)), receive()),
        )
        assert not client.ready
        for _ in range(2):
            await client.submit([request()], request_id="waits")
        cores.append(opened(EchoCore(config, 1, epoch=config.epoch + 1)))
        await until(lambda: len(cores[1].requests) == 2, receive)
        assert not cores[0].requests
        publisher.close()


@on_event_loop
async def test_requests_go_to_a_replica_with_their_adapter_until_it_is_too_busy(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = engine_config(tmp_path, epoch=FIRST_EPOCH, parallel=parallel)
    cores = [opened(EchoCore(config, 0)), opened(EchoCore(config, 1))]
    client = opened(EngineClient(config, 0, smollm2_tokenizer()))
    held, new = (
        LoraAdapter(name, "", bytes([number] * HASH_BYTES)) for name, number in (("a", 2), ("b", 3))
    )

    def receive() -> None:
        for core in cores:
            core.receive()

    async def submit(lora: LoraAdapter, count: int, *expected: int) -> None:
        for _ in range(count):
            await client.submit([replace(request(), lora=lora)], request_id=lora.name)
        await until(lambda: tuple(len(core.requests) for core in cores) == expected, receive)

    starting = asyncio.ensure_future(client.start())
    await until(starting.done, receive)
    # Without a report, a would go to the first replica and b to the second.
    cores[1].hub.send(
        b"client0", ReplicaLoadUpdate(0, stored=uint64_bytes([adapter_key(held.version)]))
    )
    answer = asyncio.ensure_future(client.reset_prefix_cache())
    await until(answer.done, receive)
    await submit(held, HEADROOM, 0, HEADROOM)
    await submit(new, 1, 1, HEADROOM)
    await submit(held, 3, 2, HEADROOM + 2)
