"""Blocks of the KV cache in LMCache outlive all processes, and a server of LMCache that hangs fails no request."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import psutil
import pytest
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held, default_model

pytest.importorskip("lmcache", reason="the extra engine-serve[lmcache] is not installed")

PROMPT = "Anna once upon a time. " * 20
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 2 * 30 * 3 * 64 * 16
"""Keys and values of 30 layers with 3 heads of 64 elements, in bfloat16, of 16 tokens."""


def make_server(config: Path, **extra: object) -> Server:
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    args = (default_model(), "--max-model-len", "512", "--kv-transfer-config", json.dumps(transfer))
    return Server(*args, env={"LMCACHE_CONFIG_FILE": str(config)})


def ask(server: Server) -> tuple[str, int, int]:
    """Return the answer, how many tokens of the prompt were cached, and how many can be."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    usage = answer["usage"]
    most = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return answer["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], most


def test_prompts_are_found_in_lmcache_after_all_processes_were_killed(tmp_path: Path) -> None:
    """Damaged and missing blocks are computed, and so is everything when LMCache's server does not answer."""
    config = tmp_path / "lmcache.yaml"
    blocks = tmp_path / "blocks"
    remote = {"remote_storage_plugin.fs.base_path": str(blocks)}
    settings = {"max_local_cpu_size": 0.2, "remote_storage_plugins": ["fs"], "extra_config": remote}
    config.write_text(json.dumps(settings))
    with make_server(config) as server:
        text, num_cached, most = ask(server)
        assert num_cached == 0 < most
        wait_until(
            lambda: (
                server.metric("engine:kv_disk_written_bytes_total")
                >= most // BLOCK_TOKENS * BLOCK_BYTES
            ),
            what="the prompt is stored",
        )
        for victim in [*server.find_children(), psutil.Process(server.process.pid)]:
            victim.kill()
        server.process.wait()
    first, *others = sorted(blocks.glob("*.data"), key=lambda path: path.stat().st_mtime_ns)
    assert len(others) >= most // BLOCK_TOKENS - 1
    with make_server(config) as server:
        assert ask(server) == (text, most, most)
        assert server.metric("engine:kv_disk_hits_total") == most
        assert_nothing_is_held(server)
    damaged = bytearray(first.read_bytes())
    damaged[BLOCK_BYTES // 2] ^= 1
    first.write_bytes(damaged)
    with make_server(config) as server:
        assert ask(server)[0] == text
        assert server.metric("engine:kv_transfer_failed_loads_total") == 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = {"max_local_cpu_size": 0.2}
        config.write_text(json.dumps(settings))
        url = f"lm://127.0.0.1:{listener.getsockname()[1]}"
        with make_server(config, timeout_s=1, **{"lmcache.remote_url": url}) as server:
            assert ask(server) == (text, 0, most)
            assert "disabling LMCache: no answer within 1 s" in server.log
            assert_nothing_is_held(server)
