"""Images, adapters, embeddings as prompts, beams and text share a server whose processes crash: no answer changes."""

from __future__ import annotations

import base64
import concurrent.futures
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save
from support.image_requests import chat, picture
from support.lora_adapters import write_adapter
from support.program import wait_until
from support.server import Server, assert_nothing_is_held
from support.vision_checkpoints import vision_directory

torch.set_num_threads(1)
FLAGS = (
    *("--dtype", "float32", "--device", "cpu", "--served-model-name", "tiny"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "6", "--max-model-len", "700"),
    *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--enable-prompt-embeds"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    *("--num-gpu-blocks-override", "160"),
)
ADAPTERS = ("one", "two", "three")
LENGTH = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
SAMPLED = {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}


def requests(embeds: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all kinds, as path and body."""
    shared = picture(1, 200, 150)
    chats = [
        chat("the quick", shared, "brown fox", picture(2, 64, 64), "jumps"),
        chat("the quick", shared, "brown fox", picture(3, 90, 210), "jumps"),
        chat(shared, picture(4, 64, 64)) | SAMPLED,
        chat("seven wizards", picture(5, 64, 64)) | {"model": "one"},
        chat("brew tea") | {"model": "two"},
        chat("brew tea") | {"response_format": {"type": "json_object"}},
    ]
    prompts: list[dict[str, Any]] = [
        {"prompt": list(range(5, 60))},
        {"prompt": list(range(5, 60)), "model": "three"},
        {"prompt": [9, 8, 7] * 20, "model": "one", "n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": [11, 12], "n": 3, "use_beam_search": True},
        {"prompt_embeds": embeds},
        {"prompt_embeds": embeds, "model": "two"},
    ]
    return [("/v1/chat/completions", each | LENGTH | _own(each)) for each in chats] + [
        ("/v1/completions", LENGTH | {"return_token_ids": True} | each) for each in prompts
    ]


def _own(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a sampled request that `LENGTH` must not replace."""
    return {key: body[key] for key in ("temperature",) if body[key]}


def answers(server: Server, sent: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Return the choices of all answers, which were computed together."""

    def ask(request: tuple[str, dict[str, Any]]) -> Any:
        status, answer = server.post(*request)
        return answer["choices"] if status == 200 else answer

    with concurrent.futures.ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(ask, sent))


@pytest.fixture(scope="module")
def embeds() -> str:
    values = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    return base64.b64encode(save({"embeddings": values})).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("all")
    path, model = vision_directory(directory / "model", "smolvlm")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(directory / name, model, seed, r".*text_model.*_proj")
    modules = [f"{name}={directory / name}" for name in ADAPTERS]
    with Server(str(path), *FLAGS, "--lora-modules", *modules) as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def undisturbed(server: Server, embeds: str) -> list[Any]:
    found = answers(server, requests(embeds))
    assert [choices for choices in found if not isinstance(choices, list)] == []
    return found


@pytest.mark.parametrize("titles", [("worker 0",), ("core 0",), ("core 0", "worker 0")])
def test_answers_are_unchanged_by_crashes(
    server: Server, undisturbed: list[Any], embeds: str, titles: tuple[str, ...]
) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(answers, server, requests(embeds))
        for title in titles:
            wait_until(lambda: server.metric("engine:num_requests_running") > 1, what="they run")
            victim = server.child(title)
            victim.kill()
            psutil.wait_procs([victim], timeout=10)
        assert found.result() == undisturbed
    assert_nothing_is_held(server)
