"""With vLLM's `NixlConnector`, a server generates from blocks that another one has computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.protocol.cluster_key import ClusterKey
from support.processes.machines import free_ports
from support.servers.server import Server, assert_nothing_is_held, default_model

pytest.importorskip(
    "nixl", reason="the extra engine-serve[nixl] is not installed", exc_type=ImportError
)

NUM_TOKENS = 100
NUM_WHOLE = (NUM_TOKENS - 1) // 16 * 16


def test_a_server_fetches_blocks_from_another_one_with_nixl(tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    ClusterKey.generate().save(str(key))

    def start(**fields: Any) -> Server:
        config = json.dumps({"kv_connector": "NixlConnector", **fields})
        flags = ("--cluster-key", str(key), "--kv-transfer-config", config)
        return Server(default_model(), "--max-model-len", "512", *flags)

    port = free_ports("127.0.0.1", 1)
    with (
        start(kv_role="kv_producer", kv_port=port) as prefill,
        start(kv_role="kv_consumer") as decode,
    ):
        for first in (11, 12):
            body = {
                "prompt": [first, *((1000 + 7919 * i) % 20_000 for i in range(1, NUM_TOKENS))],
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            remote = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            status, prefilled = prefill.post("/v1/completions", body | remote)
            assert status == 200, prefilled
            fetching = body | {"kv_transfer_params": prefilled["kv_transfer_params"]}
            status, answer = decode.post("/v1/completions", fetching)
            assert status == 200, answer
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_WHOLE
            status, alone = prefill.post("/v1/completions", body)
            assert status == 200, alone
            assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert decode.metric("engine:kv_transfer_failed_loads_total") == 0
        for server in (prefill, decode):
            assert "Backend UCX was instantiated" in server.log
            assert_nothing_is_held(server)
