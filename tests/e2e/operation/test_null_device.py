"""A whole server on the null device, which has no model."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from engine.workers.execution.null_runner import made_up_tokens, ordinary_token_ids
from prometheus_client.parser import text_string_to_metric_families
from support.processes.program import wait_until
from support.servers.server import Server, default_model

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def server():
    flags = ("--device", "null", "--null-step-ms", "1", "-np", "8")
    # A forked server might have torch from its parent.
    with Server("--model", default_model(), *flags, env={"PYTHONPATH": ""}) as server:
        yield server


def test_the_warm_up_request_is_not_counted() -> None:
    """Tests and dashboards for vLLM expect exactly the requests of clients."""
    flags = ("--device", "null", "--null-step-ms", "1", "--metrics-compat", "vllm", "-dp", "2")
    with Server("--model", default_model(), *flags, "--api-server-count", "2") as server:
        server.wait_until_whole()
        _, text = server.get("/metrics")
        for capacity in re.findall("vllm:cache_config_info{(.*)}", text):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', capacity))
            # The default model has full attention and a context of 8,192 tokens.
            num_tokens = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
            assert int(labels["kv_cache_size_tokens"]) == num_tokens
            assert float(labels["kv_cache_max_concurrency"]) == num_tokens / 8192
        counts = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            if family.type in ("counter", "histogram") and not family.name.startswith("process_")
            for sample in family.samples
            if sample.name.endswith(("_total", "_count", "_sum"))
        }
        assert {"vllm:iteration_tokens_total_count", "vllm:prompt_tokens_total"} <= counts.keys()
        assert not {name: value for name, value in counts.items() if value}
        for _ in range(2):
            status, answer = complete(server)
            assert status == 200, answer
        for name, value in {
            "vllm:prompt_tokens_total": 6,
            "vllm:generation_tokens_total": 80,
            "vllm:request_success_total": 2,
            "vllm:request_prompt_tokens_sum": 6,
            "vllm:time_to_first_token_seconds_count": 2,
            "vllm:iteration_tokens_total_sum": 86,
            "vllm:iteration_tokens_total_count": 80,
            "vllm:prefix_cache_queries_total": 6,
        }.items():
            wait_until(lambda n=name, v=value: server.metric(n) == v, what=f"{name} is {value}")


def complete(server: Server, **fields: object) -> tuple[int, dict]:
    body = {"prompt": [10, 11, 12], "max_tokens": 40, "return_token_ids": True, **fields}
    return server.post("/v1/completions", body)


def test_tokens_are_a_known_function_of_the_seed(server: Server) -> None:
    status, answer = complete(server, seed=5)
    assert status == 200, answer
    positions = np.arange(3, 43, dtype=np.int32)
    seeds = np.full(40, 5, np.int64)
    # SmolLM2's end of a turn is 2, and its end of text is 0.
    expected = made_up_tokens(seeds, positions, ordinary_token_ids(VOCAB_SIZE, (0, 2)))
    assert answer["choices"][0]["token_ids"] == expected.tolist()
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_and_grammars_are_supported(server: Server) -> None:
    status, answer = complete(server, logprobs=2, prompt_logprobs=3, max_tokens=4)
    assert status == 200, answer
    [choice] = answer["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [3] * 4
    assert [top and len(top) for top in choice["prompt_logprobs"]] == [None, 4, 4]
    status, answer = complete(server, prompt=[10], prompt_logprobs=3)
    assert status == 200, answer
    assert answer["choices"][0]["prompt_logprobs"] == [None]
    for seed in range(5):
        # The grammar forces the tokens of the name, which no model verifies as drafts.
        name = "a long name with several tokens"
        properties = {name: {"enum": [1, "x"]}}
        schema = {"type": "object", "properties": properties, "required": [name]}
        constraint = {"json": schema}
        status, answer = complete(server, structured_outputs=constraint, seed=seed, max_tokens=300)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length" or json.loads(choice["text"])[name] in (1, "x")
    assert "restarting" not in server.log


def test_texts_and_tokens_have_vectors(server: Server) -> None:
    for task, dimensions in (("embed", 1), ("token_embed", 2)):
        status, answer = server.post("/pooling", {"input": [5, 6, 7], "task": task})
        assert (status, np.ndim(answer["data"][0]["data"])) == (200, dimensions)


def test_an_operator_aborts_requests_by_their_id(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        ids = ("one", "two", "two")
        running = [pool.submit(complete, server, max_tokens=4000, rid=each) for each in ids]
        for rid, count in (("two", 2), ("one", 1)):
            aborted = 0
            while aborted < count:
                status, answer = server.post("/abort_request", {"rid": rid})
                assert status == 200, answer
                aborted += answer["aborted"]
        for future in running:
            status, answer = future.result()
            assert status == 200, answer
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "abort"
            assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] < 4000


def test_a_frontend_leaves_most_descriptors_to_connections() -> None:
    """With `ulimit -n 100`, 40 connections are accepted beside those that are reserved for probes."""
    with Server("--device", "null") as server:
        assert server.child("frontend 0").num_fds() < 40


def test_the_worker_does_not_load_torch(server: Server) -> None:
    worker: psutil.Process = server.child("worker 0")
    assert not [file.path for file in worker.memory_maps() if "torch" in file.path]
