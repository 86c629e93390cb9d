"""Beam search finds what transformers finds."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine import LLM, BeamSearchParams
from engine.protocol.errors import ParameterError
from support.checkpoints.tiny import qwen3_directory
from support.media.image_requests import NUM_TOKENS, chat
from support.servers.server import DEVICE, Server
from support.vision.models import CHATS, Model

PROMPTS = [list(range(5, 45)), [7, 9, 11]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> tuple[Path, transformers.PreTrainedModel]:
    return qwen3_directory(tmp_path_factory.mktemp("beams") / "model")


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, transformers.PreTrainedModel]) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with Server(str(checkpoint[0]), *flags, "--chat-template", template) as server:
        yield server


def expected(
    model: transformers.PreTrainedModel, prompt: list[int], ends: list[int], **settings: Any
) -> list[list[int]]:
    """Return the tokens of transformers' beams, the best first."""
    config = transformers.GenerationConfig(
        do_sample=False,
        num_beams=4,
        num_return_sequences=4,
        eos_token_id=ends or None,
        pad_token_id=0,
        early_stopping="never",
        **settings,
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(ids, config, attention_mask=torch.ones_like(ids))
    beams = [row[len(prompt) :].tolist() for row in found]
    stops = [next((i for i, token in enumerate(beam) if token in ends), 99) for beam in beams]
    return [beam[: stop + 1] for beam, stop in zip(beams, stops, strict=True)]


def search(server: Server, prompt: Any, **fields: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "prompt": prompt, "n": 4, "use_beam_search": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True, **fields})


def test_beams_are_those_of_transformers(
    server: Server, checkpoint: tuple[Path, transformers.PreTrainedModel]
) -> None:
    model = checkpoint[1]
    wanted = [
        expected(model, prompt, [], max_new_tokens=12, length_penalty=1.0) for prompt in PROMPTS
    ]
    status, answer = search(server, PROMPTS, max_tokens=12, ignore_eos=True)
    assert status == 200, answer
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert [found[:4], found[4:]] == wanted
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 12
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    # The prefix cache found the tokens of earlier steps, and a crash in the middle changes nothing.
    assert server.metric("engine:prefix_cache_hits_total") > 0
    server.child("core 0").kill()
    status, answer = search(server, PROMPTS[0], max_tokens=12, ignore_eos=True)
    assert status == 200, answer
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted[0]


def test_beams_end_and_are_compared_by_their_lengths(
    checkpoint: tuple[Path, transformers.PreTrainedModel],
) -> None:
    path, model = checkpoint
    (beam, *_) = expected(model, PROMPTS[0], [], max_new_tokens=12, length_penalty=1.0)
    # The tokenizer's own token ends beams as well.
    ends = [beam[4], 1]
    flags = {"dtype": "float32", "generation_config": "vllm"}
    with LLM(str(path), hf_overrides={"eos_token_id": ends[0]}, **flags) as llm:
        for penalty in (0.0, 1.0, 2.5):
            wanted = expected(model, PROMPTS[0], ends, max_new_tokens=12, length_penalty=penalty)
            params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=penalty)
            [output] = llm.beam_search(PROMPTS[0], params)
            found = [sequence.tokens[len(PROMPTS[0]) :] for sequence in output.sequences]
            assert found == wanted
            for sequence, tokens in zip(output.sequences, wanted, strict=True):
                assert sequence.finish_reason == ("stop" if tokens[-1] in ends else "length")
                assert sequence.cum_logprob < 0
        with pytest.raises(ParameterError, match=r"beam_width must be between 1 and 10, got 11"):
            llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=11, max_tokens=1))


def test_chats_are_searched(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    status, answer = server.post(
        "/v1/chat/completions",
        {**body, "use_beam_search": True, "max_tokens": 5, "return_token_ids": True},
    )
    assert status == 200, answer
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert len(found) == 2 and found[0] != found[1]
    assert all(choice["message"]["content"] for choice in answer["choices"])


def test_beams_share_their_images(tmp_path: Path) -> None:
    """Beams are those of transformers, also after a crash. They share the prompt's blocks."""
    grid = Model(tmp_path, "idefics3")
    request = chat(*CHATS[0]) | {"n": 3, "use_beam_search": True}
    with Server(str(grid.path), "--dtype", "float32", "--device", DEVICE) as server:
        status, answer = server.post("/v1/chat/completions", request)
        assert status == 200, answer
        expected = grid.find_beams(0, answer["prompt_token_ids"], 3)
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        # The first step computes the prompt, and 3 beams of all others find all its full blocks.
        num_steps, num_tokens = NUM_TOKENS - 1, len(answer["prompt_token_ids"])
        hits = server.metric("engine:prefix_cache_hits_total")
        assert hits >= 3 * num_steps * (num_tokens // 16 * 16 - 16)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            again = pool.submit(server.post, "/v1/chat/completions", request)
            server.child("core 0").kill()
            assert [choice["token_ids"] for choice in again.result()[1]["choices"]] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 11}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_beam_search_rejects_unsupported_parameters(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    status, answer = search(server, PROMPTS[1], max_tokens=2, **fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param
