"""A server that computes prompts, servers that generate, and the proxy of `examples/` in front of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from engine.protocol.cluster_key import ClusterKey
from support.processes.machines import free_ports
from support.processes.program import Program
from support.servers.server import Server, assert_nothing_is_held, default_model

PROXY = Path(__file__).parents[3] / "examples" / "disaggregated_prefill.py"
NUM_TOKENS = 100
NUM_WHOLE = (NUM_TOKENS - 1) // 16 * 16
"""Tokens in blocks that can be fetched; the last token is computed by the server that generates."""

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As the proxies in vLLM's repository send it."""

NOTHING_REMOTE = REMOTE_DECODE | {"do_remote_decode": False, "remote_engine_id": "a"}


class Servers(NamedTuple):
    prefill: Server
    recomputing: Server
    failing: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    key = tmp_path_factory.mktemp("key") / "cluster.key"
    ClusterKey.generate().save(str(key))

    def start(**fields: Any) -> Server:
        config = json.dumps({"kv_connector": "direct", **fields})
        flags = ("--cluster-key", str(key), "--kv-transfer-config", config)
        limits = ("--max-model-len", "512", "--enable-prompt-tokens-details")
        return Server(default_model(), *limits, *flags, wait=False)

    both_ways = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
    with (
        start(kv_role="kv_producer", kv_port=free_ports("127.0.0.1", 1), **both_ways) as prefill,
        start(
            kv_role="kv_consumer", kv_port=free_ports("127.0.0.1", 1), **both_ways
        ) as recomputing,
        start(kv_role="kv_consumer", kv_load_failure_policy="fail") as failing,
    ):
        servers = Servers(prefill, recomputing, failing)
        for server in servers:
            server.wait_for("ready at")
        yield servers


def body_for(first: int) -> dict[str, Any]:
    return {
        "prompt": [first, *((1000 + 7919 * i) % 20_000 for i in range(1, NUM_TOKENS))],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def cached_tokens(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_answers_through_the_proxy_equal_those_of_one_server(servers: Servers) -> None:
    port = free_ports("127.0.0.1", 1)
    decode = [servers.recomputing.url, servers.failing.url]
    command = [sys.executable, str(PROXY), "--port", str(port), "--prefill", servers.prefill.url]
    with Program([*command, "--decode", *decode], {}) as proxy:
        proxy.wait_for("Uvicorn running on")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            for first in (11, 12):
                answer = client.post("/v1/completions", json=body_for(first)).json()
                assert cached_tokens(answer) == NUM_WHOLE
                # Decode servers take turns. The prefill server has the blocks as well.
                status, alone = servers.prefill.post("/v1/completions", body_for(first))
                assert status == 200
                assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
            chat = {
                "messages": [{"role": "user", "content": "Tell a tale of a fox. " * 8}],
                "max_completion_tokens": 8,
                "temperature": 0,
                "stream_options": {"include_usage": True},
                "stream": True,
            }
            with client.stream("POST", "/v1/chat/completions", json=chat) as response:
                lines = [line for line in response.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
            assert cached_tokens(chunks[-1]) > 0
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
            whole = {name: chat[name] for name in chat if not name.startswith("stream")}
            status, alone = servers.prefill.post("/v1/chat/completions", whole)
            assert (status, text) == (200, alone["choices"][0]["message"]["content"])
            assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
            assert_dialects_fetch_prompts(client, servers)
    for server in servers:
        assert_nothing_is_held(server)
    assert servers.recomputing.metric("engine:kv_transfer_failed_loads_total") == 0


def assert_dialects_fetch_prompts(client: httpx.Client, servers: Servers) -> None:
    """Compare answers of Anthropic's Messages API and of the Responses API with those of one server."""
    text = "Sing a song of a crow. " * 8
    message = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    response = {"input": text, "max_output_tokens": 8, "store": False}
    for path, fields, output in (
        ("/v1/messages", message, "content"),
        ("/v1/responses", response, "output"),
    ):
        body = fields | {"temperature": 0, "cache_salt": path}
        answer = client.post(path, json=body).json()
        usage = answer["usage"]
        details = usage.get("input_tokens_details", {})
        assert usage.get("cache_read_input_tokens", details.get("cached_tokens")) > 0
        status, alone = servers.prefill.post(path, body)
        assert status == 200
        assert texts_of(answer[output]) == texts_of(alone[output])
        streamed = body | {"stream": True, "kv_transfer_params": NOTHING_REMOTE}
        with httpx.stream(
            "POST", servers.recomputing.url + path, json=streamed, timeout=120
        ) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        ends = [each for each in events if each["type"] in ("message_delta", "response.incomplete")]
        params = ends[-1].get("response", ends[-1])["kv_transfer_params"]
        assert params["do_remote_decode"] is True


def texts_of(items: list[dict[str, Any]]) -> list[str]:
    parts = [part for item in items for part in item.get("content", [item])]
    return [part["text"] for part in parts]


def test_a_prefill_server_fetches_the_answer_of_the_turn_before(servers: Servers) -> None:
    body = body_for(21) | {"max_tokens": 80}
    prefill = {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    status, answer = servers.prefill.post("/v1/completions", body | prefill)
    assert status == 200
    params = {"kv_transfer_params": answer["kv_transfer_params"]}
    status, answer = servers.recomputing.post("/v1/completions", body | params)
    assert (status, cached_tokens(answer)) == (200, NUM_WHOLE)
    params = answer["kv_transfer_params"]
    # The key and the value of the last token have not been computed.
    assert params["remote_num_tokens"] == NUM_TOKENS + 80 - 1
    prompt = [*body["prompt"], *answer["choices"][0]["token_ids"], 5, 6, 7]
    again = body | {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    status, first = servers.prefill.post("/v1/completions", again)
    assert (status, cached_tokens(first)) == (200, (NUM_TOKENS + 80 - 1) // 16 * 16)
    params = {"kv_transfer_params": first["kv_transfer_params"]}
    status, answer = servers.recomputing.post("/v1/completions", again | params)
    assert (status, cached_tokens(answer)) == (200, len(prompt) // 16 * 16)
    assert answer["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    status, alone = servers.failing.post(
        "/v1/completions", body | {"prompt": prompt, "max_tokens": 1}
    )
    assert (status, cached_tokens(alone)) == (200, 0)
    assert alone["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    chat = {
        "messages": [{"role": "user", "content": "Tell a tale."}],
        "max_tokens": 4,
        "stream": True,
        "kv_transfer_params": NOTHING_REMOTE,
    }
    completion = again | params | {"stream": True}
    for path, streamed in (("completions", completion), ("chat/completions", chat)):
        url = f"{servers.recomputing.url}/v1/{path}"
        with httpx.stream("POST", url, json=streamed, timeout=120) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert ["kv_transfer_params" in chunk for chunk in chunks] == [
            chunk["choices"][0]["finish_reason"] is not None for chunk in chunks
        ]
    for server in servers:
        assert_nothing_is_held(server)


def test_a_prefill_server_that_is_killed_in_between_costs_time_only(servers: Servers) -> None:
    body = body_for(13)
    first = body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    status, answer = servers.prefill.post("/v1/completions", first)
    assert status == 200
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] and params["remote_block_ids"]
    for victim in [*servers.prefill.find_children(), psutil.Process(servers.prefill.process.pid)]:
        victim.kill()
    servers.prefill.process.wait()
    second = body | {"kv_transfer_params": params}
    status, answer = servers.recomputing.post("/v1/completions", second)
    assert status == 200
    assert cached_tokens(answer) == 0
    # A server that may not compute what it cannot load refuses.
    status, refusal = servers.failing.post("/v1/completions", second)
    assert status == 500
    assert "loading the KV cache of the request failed" in refusal["error"]["message"]
    status, alone = servers.failing.post("/v1/completions", body)
    assert (status, answer["choices"][0]["token_ids"]) == (200, alone["choices"][0]["token_ids"])
    for server in servers[1:]:
        assert_nothing_is_held(server)
