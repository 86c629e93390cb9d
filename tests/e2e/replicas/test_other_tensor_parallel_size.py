"""Servers with different tensor-parallel sizes compute prompts for each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.protocol.cluster_key import ClusterKey
from support.checkpoints.tiny import layers_directory, qwen3_directory
from support.processes.machines import free_ports
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held

NUM_TOKENS = 450
FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny"),
    *("--max-model-len", "512", "--enable-prompt-tokens-details"),
)
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

BLOCKS = ("--block-size", "224")
"""A state is divided and latent keys are not, so more ranks would choose smaller blocks."""

MODELS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "grouped": (qwen3_directory, 2, ()),
    "replicated head in int8": (qwen3_directory, 4, ("--kv-cache-dtype", "int8")),
    "torch": (qwen3_directory, 2, ("--cpu-backend", "torch")),
    "hybrid": (lambda path: layers_directory(path, "delta net"), 2, ()),
    "latent hybrid": (lambda path: layers_directory(path, "kimi delta attention"), 2, BLOCKS),
    "compressed": (lambda path: layers_directory(path, "compressed"), 2, ()),
}
"""The function that saves each model, the tensor-parallel size of the second server, and flags."""


@contextmanager
def servers_of(
    tmp_path: Path, make: Any, *flags_of_servers: tuple[str, ...], **fields: Any
) -> Iterator[list[Server]]:
    """Start a server for each of `flags_of_servers`. All of them offer their blocks."""
    key = tmp_path / "cluster.key"
    ClusterKey.generate().save(str(key))
    model = tmp_path / "model"
    model.mkdir()
    path, _ = make(model)
    with ExitStack() as stack:
        servers = []
        for flags in flags_of_servers:
            port = free_ports("127.0.0.1", 4)
            config = json.dumps({"kv_connector": "direct", "kv_port": port, **fields})
            transfer = ("--cluster-key", str(key), "--kv-transfer-config", config)
            server = Server(str(path), *FLAGS, *flags, *transfer, wait=False)
            servers.append(stack.enter_context(server))
        for server in servers:
            server.wait_for("ready at")
        yield servers


def body_for(first: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [first, *(4 + 7919 * i % 290 for i in range(1, NUM_TOKENS))],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(server: Server, body: dict[str, Any]) -> tuple[list[int], int, dict[str, Any] | None]:
    """Return the tokens, the number of cached tokens, and the parameters for the next server."""
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached, answer.get("kv_transfer_params")


def prefill(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    first = body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    _, _, params = ask(server, first)
    assert params is not None
    return {"kv_transfer_params": params}


@pytest.mark.parametrize(
    ("kind", "transport"), [*((kind, "sockets") for kind in MODELS), ("hybrid", "nixl")]
)
def test_tokens_equal_those_of_one_server_in_both_directions(
    tmp_path: Path, kind: str, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    make, size, flags = MODELS[kind]
    extra = {"kv_connector_extra_config": {"transport": transport}}
    with servers_of(tmp_path, make, flags, (*flags, "-tp", str(size)), **extra) as servers:
        for number, (source, target) in enumerate((servers, servers[::-1])):
            for first in (10 + number, 20 + number):
                body = body_for(first)
                params = prefill(source, body)
                tokens, cached, _ = ask(target, body | params)
                assert cached >= NUM_TOKENS // 3
                alone, _, _ = ask(source, body)
                assert tokens == alone
        for server in servers:
            assert server.metric("engine:kv_transfer_failed_loads_total") == 0
            assert_nothing_is_held(server)


def test_workers_that_die_cost_time_only(tmp_path: Path) -> None:
    with servers_of(tmp_path, qwen3_directory, (), ("-tp", "2"), transfer_timeout_s=2) as (
        one,
        two,
    ):
        expected, _, _ = ask(one, body_for(10))
        params = prefill(two, body_for(10))
        # A worker of the server that has computed the prompt dies, and with it a part of each block.
        two.child("worker 1").kill()
        tokens, _, _ = ask(one, body_for(10) | params)
        assert tokens == expected
        # Nobody fetches these blocks, because the server that was meant to do so dies.
        wait_until(lambda: two.get("/readyz")[0] == 200, 60, what="the worker is back")
        prefill(two, body_for(11))
        wait_until(lambda: two.metric("engine:kv_transfer_expired_total") > 0, 20)
        for server in (one, two):
            assert_nothing_is_held(server)


def test_servers_with_other_blocks_say_why_they_exchange_none(tmp_path: Path) -> None:
    flags = ("--block-size", "32"), ("-tp", "2")
    with servers_of(tmp_path, qwen3_directory, *flags) as (source, target):
        tokens, cached, _ = ask(target, body_for(10) | prefill(source, body_for(10)))
        assert (len(tokens), cached) == (16, 0)
        target.wait_for("its blocks have 16 tokens, and those of the other server 32")
