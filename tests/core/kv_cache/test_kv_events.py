"""Events of cached blocks: their content, and their publication to subscribers."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import zmq
from engine.core.reporting.kv_event_publisher import KVEventPublisher, endpoint_of_core
from engine.protocol.block_hash import ROOT_HASH, hash_blocks
from engine.protocol.config import KVEventsConfig
from engine.protocol.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from support.scheduler.harness import Harness
from support.scheduler.traffic import Traffic

pytestmark = pytest.mark.slow


def test_3_8_stored_events_contain_tokens_and_parent():
    harness = Harness(block_size=4, log_kv_events=True)
    key = harness.add(10, 7)
    harness.drain()
    prompt, output = harness.scheduler.take_kv_events()
    tokens = list(range(1, 11)) + harness.received[key].token_ids
    assert prompt.token_ids + output.token_ids == tokens[:16]
    assert (prompt.parent_block_hash, output.parent_block_hash) == (None, prompt.block_hashes[-1])
    digests = hash_blocks(np.array(tokens[:16], np.int32), 4, ROOT_HASH)
    assert b"".join(prompt.block_hashes + output.block_hashes) == digests
    assert harness.scheduler.take_kv_events() == []


def test_3_8_content_that_is_cached_already_is_not_stored_again():
    harness = Harness(block_size=4, log_kv_events=True)
    for _ in range(2):
        harness.add(12, 1)
        harness.drain()
    stored = harness.scheduler.take_kv_events()
    assert [len(event.block_hashes) for event in stored] == [3]


def test_3_8_a_reset_clears_everything():
    harness = Harness(block_size=4, log_kv_events=True)
    harness.add(12, 1)
    harness.drain()
    harness.scheduler.take_kv_events()
    assert harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.take_kv_events() == [AllBlocksCleared()]


@pytest.mark.parametrize("seed", range(10))
def test_3_8_a_subscriber_can_mirror_the_cache_exactly(seed):
    rng = random.Random(seed)
    harness = Harness(
        block_size=2, num_blocks=20, log_kv_events=True, max_in_flight=3, max_num_seqs=5
    )
    traffic = Traffic(harness, rng)
    known: set[bytes] = set()
    for _ in range(400):
        traffic.act()
        for event in harness.scheduler.take_kv_events():
            if isinstance(event, BlockStored):
                assert not known & set(event.block_hashes)
                assert len(event.token_ids) == 2 * len(event.block_hashes)
                parent = event.parent_block_hash
                assert parent is None or parent in known
                known |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert known >= set(event.block_hashes)
                known -= set(event.block_hashes)
            else:
                known.clear()
        pool = harness.scheduler.kv_cache_manager.pool
        assert len(known) == pool.num_cached
        assert all(pool.is_cached(digest) for digest in known)
    harness.drain()


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def receive(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(5000), "nothing came"
    return socket.recv_multipart()


def events(name: bytes) -> list[BlockRemoved]:
    return [BlockRemoved([name], "GPU")]


def test_3_8_batches_are_published_in_sequence_and_replayed_on_request(context, tmp_path):
    config = KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=3,
        topic="kv",
    )
    publisher = KVEventPublisher(context, config, core_index=0)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(config.endpoint)
    subscriber.subscribe(b"kv")
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    # A new subscription takes a moment to arrive: publish until something comes through.
    count = 0
    while not subscriber.poll(20):
        publisher.publish(events(b"early"))
        count += 1
    for name in (b"a", b"b"):
        publisher.publish(events(name))
    count += 2
    received = [receive(subscriber)]
    while int.from_bytes(received[-1][1], "big") < count - 1:
        received.append(receive(subscriber))
    assert all(topic == b"kv" for topic, _, _ in received)
    sequences = [int.from_bytes(sequence, "big") for _, sequence, _ in received]
    assert sequences == list(range(sequences[0], count))
    batches = [decode(frame) for _, _, frame in received[-2:]]
    assert [batch.events[0].block_hashes for batch in batches] == [[b"a"], [b"b"]]
    assert batches[0].data_parallel_rank == 0

    publisher.publish(events(b"c"))
    asker = context.socket(zmq.REQ)
    asker.connect(config.replay_endpoint)
    asker.send((count - 1).to_bytes(8, "big"))
    assert publisher.replay_socket.poll(5000)
    publisher.serve_replays()
    answer = receive(asker)
    assert decode(answer[1]).events[0].block_hashes == [b"b"]
    publisher.close()


def test_3_8_a_replay_sends_the_buffered_batches_and_ends(context, tmp_path):
    config = KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=3,
    )
    publisher = KVEventPublisher(context, config, core_index=0)
    for name in (b"a", b"b", b"c", b"d"):
        publisher.publish(events(name))
    asker = context.socket(zmq.DEALER)
    asker.connect(config.replay_endpoint)
    asker.send_multipart((b"nonsense",))
    asker.send_multipart((b"", (0).to_bytes(8, "big")))
    frames: list[list[bytes]] = []
    while not frames or frames[-1][1] != END_OF_REPLAY:
        publisher.serve_replays()
        if asker.poll(20):
            frames.append(asker.recv_multipart())
    assert [int.from_bytes(frame[1], "big") for frame in frames[:-1]] == [1, 2, 3]
    publisher.close()


def test_3_8_a_replay_is_complete_for_a_slow_reader(context, tmp_path):
    num_kept = 4000
    config = KVEventsConfig(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        buffer_steps=num_kept,
    )
    publisher = KVEventPublisher(context, config, core_index=0)
    for _ in range(num_kept):
        publisher.publish(events(bytes(1000)))
    asker = context.socket(zmq.DEALER)
    asker.set(zmq.RCVHWM, 1)
    asker.connect(config.replay_endpoint)
    asker.send_multipart((b"", (0).to_bytes(8, "big")))
    assert publisher.replay_socket.poll(5000)
    publisher.serve_replays()
    sequences = [receive(asker)[1] for _ in range(num_kept)]
    assert sequences == [number.to_bytes(8, "big") for number in range(num_kept)]
    assert receive(asker)[1] == END_OF_REPLAY
    publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "of_core_2"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("ipc:///run/events", "ipc:///run/events.2"),
    ],
)
def test_every_core_publishes_at_its_own_endpoint(endpoint, of_core_2):
    assert endpoint_of_core(endpoint, 0) == endpoint
    assert endpoint_of_core(endpoint, 2) == of_core_2
