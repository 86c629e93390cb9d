"""A server whose replica has several workers."""

from __future__ import annotations

import concurrent.futures
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.tiny import gemma3_gguf, qwen3_directory
from support.processes.program import wait_until
from support.servers.server import Server

FLAGS = ("--dtype", "float32", "--served-model-name", "tiny")
# Prompts come in chunks that share steps with other requests' decodes.
SMALL_STEPS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "8")
PREEMPTION = ("--inject-preemption", "0.02")


def generate(server: Server, prompt: list[int], **sampling: object) -> list[int]:
    status, answer = server.post(
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 40,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampling,
        },
    )
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def serve(path: Path, *flags: str, has_drafts: bool = False) -> list[list[int]]:
    """Return the tokens of greedy and seeded requests of all sizes, sent together and preempted at random."""
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randrange(1, 90))] for _ in range(8)]
    # Drafts are verified when no request waits, and greedy answers repeat themselves.
    sampling = [{"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2}, {"temperature": 0}]
    with Server(str(path), *FLAGS, *SMALL_STEPS, *flags, *PREEMPTION) as server:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            served = pool.map(
                lambda request: generate(server, request[0], **request[1]),
                [(prompt, params) for params in sampling for prompt in prompts],
            )
            tokens = list(served)
        wait_until(lambda: server.metric("engine:kv_cache_usage_perc") == 0)
        if has_drafts:
            assert server.metric("engine:spec_decode_num_accepted_tokens_total") > 10
        assert server.stop() == 0, server.log
    return tokens


@pytest.fixture(scope="module")
def tokens_of_one() -> dict[Any, list[list[int]]]:
    """Return the tokens of a single worker for each checkpoint."""
    return {}


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (gemma3_gguf, ["-tp", "2", "-pp", "2"]),
        (qwen3_directory, ["-dp", "2", "-tp", "2"]),
    ],
)
def test_a_server_with_several_workers_gives_the_tokens_of_one(
    tmp_path: Path, tokens_of_one: dict[Any, list[list[int]]], make, flags: list[str]
) -> None:
    path, _ = make(tmp_path)
    if make not in tokens_of_one:
        tokens_of_one[make] = serve(path)
    assert serve(path, *flags) == tokens_of_one[make]


@pytest.mark.parametrize(
    ("make", "method", "flags"),
    [
        (gemma3_gguf, "suffix", ["-pp", "3"]),
        (qwen3_directory, "draft_model", ["-pp", "2"]),
    ],
)
def test_pipeline_stages_verify_drafts(
    tmp_path: Path, tokens_of_one: dict[Any, list[list[int]]], make, method: str, flags: list[str]
) -> None:
    path, _ = make(tmp_path)
    if make not in tokens_of_one:
        tokens_of_one[make] = serve(path)
    drafts = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    if method == "draft_model":
        drafts["model"] = str(path)
    flags = [*flags, "--speculative-config", json.dumps(drafts)]
    assert serve(path, *flags, has_drafts=True) == tokens_of_one[make]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["-tp", "3"], ["--tensor-parallel-size 3", "4 attention heads", "use 1, 2 or 4"]),
        (["-pp", "4"], ["--pipeline-parallel-size 4", "only 3 layers"]),
    ],
)
def test_a_model_that_cannot_be_split_starts_no_process(
    tmp_path: Path, flags: list[str], parts: list[str]
) -> None:
    path, _ = qwen3_directory(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "engine.frontend.cli.main",
            "serve",
            str(path),
            "--port",
            "0",
            *flags,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert all(part in done.stderr.splitlines()[-1] for part in parts), done.stderr
    assert "loading" not in done.stderr
