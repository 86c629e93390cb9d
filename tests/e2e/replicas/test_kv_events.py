"""A subscriber outside the engine receives events of cached blocks, and can request those that it missed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import zmq
from engine.protocol.kv_events import END_OF_REPLAY, AllBlocksCleared, BlockStored, KVEventBatch
from support.checkpoints.tiny import qwen3_directory
from support.servers.server import Server

TIMEOUT_MS = 60_000


def test_block_events_are_published_and_replayed(tmp_path: Path) -> None:
    path, _ = qwen3_directory(tmp_path / "model")
    events, replays = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replays}
    flags = ("--kv-events-config", json.dumps(config), "--served-model-name", "tiny")
    with Server(str(path), *flags) as server, zmq.Context() as context:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(events)
        subscriber.subscribe(b"")
        prompt, tried = list(range(5, 45)), []
        received: list[KVEventBatch] = []
        while not received:
            # A subscription takes effect after a moment. Blocks that are cached by then are not published again.
            prompt = [prompt[0] + 1, *prompt[1:]]
            tried.append(prompt[:32])
            status, _ = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
            assert status == 200
            if subscriber.poll(200):
                _, _, batch = subscriber.recv_multipart()
                received.append(msgspec.msgpack.decode(batch, type=KVEventBatch))
        (stored,) = received[0].events
        assert isinstance(stored, BlockStored)
        assert (stored.block_size, stored.parent_block_hash) == (16, None)
        assert stored.token_ids in tried and len(stored.block_hashes) == 2

        assert server.post("/reset_prefix_cache", {})[0] == 200
        server.post("/v1/completions", {"prompt": [7], "max_tokens": 1})
        dealer = context.socket(zmq.DEALER)
        dealer.connect(replays)
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        repeated = []
        while True:
            assert dealer.poll(TIMEOUT_MS)
            _, sequence, batch = dealer.recv_multipart()
            if sequence == END_OF_REPLAY:
                break
            repeated.append(msgspec.msgpack.decode(batch, type=KVEventBatch))
        assert received[0] in repeated
        assert any(isinstance(e, AllBlocksCleared) for b in repeated for e in b.events)
        for socket in (subscriber, dealer):
            socket.close(0)
