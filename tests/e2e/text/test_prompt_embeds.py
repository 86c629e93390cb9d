"""Prompts that are embeddings."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import SamplingParams
from safetensors.torch import save
from support.checkpoints.lora_adapters import write_adapter
from support.checkpoints.tiny import qwen3_directory
from support.servers.server import DEVICE, Server, assert_nothing_is_held

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--enable-prompt-embeds")
ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(values: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, values.numpy())
    return file.getvalue()


def tokens(server: Server, **body: Any) -> list[list[int]]:
    status, answer = server.post("/v1/completions", {**ASKED, **body})
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "flags",
    [
        ("-tp", "2", "-pp", "2", "--inject-preemption", "0.1"),
        ("--cpu-backend", "torch", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
    ],
)
def test_embeddings_of_tokens_give_what_the_tokens_give(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, 1)
    embedding = model.get_input_embeddings().weight.detach()
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 300) for _ in range(length)] for length in (1, 40, 150)]
    embeds = [embedding[prompt] for prompt in prompts]
    lora = ("--enable-lora", "--lora-modules", f"one={tmp_path / 'adapter'}")
    with Server(str(path), *FLAGS, *lora, "--served-model-name", "tiny", *flags) as server:
        expected = tokens(server, prompt=prompts)
        sent = [encoded(save({"x": each})) for each in embeds]
        for round_ in range(3):
            # The second time, the blocks are in the prefix cache. Then a worker is lost.
            if round_ == 2:
                server.child("worker 0").kill()
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda text: tokens(server, prompt_embeds=text)[0], sent))
            assert found == expected
        assert server.metric("engine:prefix_cache_hits_total") > 0
        # Several prompts of both kinds, an npy file, and an adapter.
        both = tokens(server, prompt_embeds=sent[1:], prompt=prompts[0])
        assert both == [*expected[1:], expected[0]]
        saved = encoded(npy(embeds[1]))
        assert tokens(server, prompt_embeds=saved) == [expected[1]]
        adapted = tokens(server, prompt=prompts[1], model="one")
        assert tokens(server, prompt_embeds=saved, model="one") == adapted != [expected[1]]
        # SGLang's formats.
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        raw = embeds[1].numpy().astype("<f4").tobytes()
        for body in (
            {"input_embeds": embeds[1].tolist()},
            {"input_embeds": [each.tolist() for each in embeds[:2]]},
            {"input_embeds_bytes": encoded(raw), "input_embeds_shape": [*embeds[1].shape]},
        ):
            status, answer = server.post("/generate", {"sampling_params": sampling, **body})
            assert status == 200, answer
            answers = answer if isinstance(answer, list) else [answer]
            assert answers[-1]["output_ids"] == expected[1]
        assert_nothing_is_held(server)


def test_other_embeddings_are_refused_with_the_reason(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    size = model.config.hidden_size
    rows = torch.zeros(3, size)
    nan = rows.clone()
    nan[1, 2] = float("nan")
    cases = {
        "not valid base64": "?",
        "not a safetensors or npy file": encoded(b"something else"),
        "it has 2 tensors": encoded(save({"x": rows, "y": nan})),
        "its type is I32": encoded(save({"x": rows.int()})),
        f"must have the shape [tokens, {size}], got [3, 8]": encoded(
            save({"x": rows[:, :8].clone()})
        ),
        f"must have the shape [tokens, {size}], got [{size}]": encoded(
            save({"x": rows[0].clone()})
        ),
        "must have at least one token": encoded(save({"x": rows[:0].clone()})),
        "at most 99 fit": encoded(save({"x": torch.zeros(100, size)})),
        "numbers that are not finite": encoded(save({"x": nan.bfloat16()})),
        "it is stored in Fortran order": encoded(npy(torch.zeros(size, 3).T)),
        "its type is <f8": encoded(npy(rows.double())),
        "which do not match the shape": encoded(npy(rows)[:-1]),
        "its header is too long": encoded(b"PK\x03\x04" + bytes(range(200, 256)) * 8),
    }
    with Server(str(path), *FLAGS, "--max-model-len", "100") as server:
        for problem, text in cases.items():
            status, answer = server.post("/v1/completions", {**ASKED, "prompt_embeds": text})
            assert (status, answer["error"]["param"]) == (400, "prompt_embeds"), answer
            assert problem in answer["error"]["message"], answer
        good = encoded(npy(rows.half()))
        for field in ({"echo": True}, {"prompt_logprobs": 1}):
            body = {**ASKED, "prompt_embeds": good, **field}
            status, answer = server.post("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, *field), answer
        # Nothing of this disturbed others.
        assert len(tokens(server, prompt_embeds=[good, good])) == 2
    with Server(str(path), *FLAGS[:4]) as server:
        status, answer = server.post("/v1/completions", {**ASKED, "prompt_embeds": good})
        assert status == 400 and "--enable-prompt-embeds" in answer["error"]["message"]


def test_offline_prompts_may_be_embeddings(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path / "base")
    embedding = model.get_input_embeddings().weight.detach()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = list(range(5, 25))
    with LLM(str(path), dtype="float32", enable_prompt_embeds=True) as llm:
        array = embedding[prompt].numpy()
        outputs = llm.generate(
            [prompt, {"prompt_embeds": array}, {"prompt_embeds": embedding[prompt]}], params
        )
        first, *others = [output.outputs[0].token_ids for output in outputs]
        assert all(list(each) == list(first) for each in others)
        for given, problem in (
            (array[0], r"shape \[tokens"),
            (array.astype(np.int32), "must contain floats"),
            (np.full_like(array, np.inf), "not finite"),
        ):
            with pytest.raises(ParameterError, match=problem):
                llm.generate({"prompt_embeds": given}, params)
