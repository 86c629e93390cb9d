"""Requests of every kind, for a server of one model that reads images and has adapters and for one of speech."""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import soundfile
import torch
from safetensors.torch import save
from support.checkpoints.lora_adapters import write_adapter
from support.media.image_requests import chat, picture
from support.requests.conversations import PATIENCE_S, TOOL, Conversation, Refused
from support.servers.server import DEVICE, Server
from support.vision.checkpoints import vision_directory
from websockets.exceptions import WebSocketException

ADAPTERS: Final = ("one", "two", "three")
FLAGS: Final = (
    *("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "6", "--max-model-len", "900"),
    *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--enable-prompt-embeds"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    *("--num-gpu-blocks-override", "160"),
)
SPEECH_FLAGS: Final = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
_LENGTH: Final = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
_SAMPLED: Final = {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}
_CALLS: Final = {"tool_choice": "required", "parallel_tool_calls": False}
_RESULTS: Final = ("choices", "data", "results", "text", "words")
"""The parts of answers that must not change; IDs and times do."""

_BOUNDARY: Final = "part"

Request: TypeAlias = tuple[str, dict[str, Any] | bytes] | Conversation
"""A path and a JSON body or a form; or a conversation."""


def write_model(directory: Path) -> tuple[str, ...]:
    """Write a small model that reads images, and its adapters. Return the arguments of a server."""
    path, model = vision_directory(directory / "model", "smolvlm")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(directory / name, model, seed, r".*text_model.*_proj")
    modules = [f"{name}={directory / name}" for name in ADAPTERS]
    return (str(path), *FLAGS, "--lora-modules", *modules)


def model_requests() -> list[Request]:
    """Return chats with and without images, completions, beams, embeddings and scores, of models and adapters."""
    values = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    embeds = base64.b64encode(save({"embeddings": values})).decode()
    shared = picture(1, 200, 150)
    chats = [
        chat("the quick", shared, "brown fox", picture(2, 64, 64), "jumps"),
        chat("the quick", shared, "brown fox", picture(3, 90, 210), "jumps"),
        chat(shared, picture(4, 64, 64)) | _SAMPLED,
        chat("seven wizards", picture(5, 64, 64)) | {"model": "one"},
        chat("brew tea") | {"model": "two"},
        chat("brew tea") | {"response_format": {"type": "json_object"}},
        chat("look out") | {"tools": [{"type": "function", "function": TOOL}], **_CALLS},
    ]
    prompts: list[dict[str, Any]] = [
        {"prompt": list(range(5, 60))},
        {"prompt": list(range(5, 60)), "model": "three"},
        {"prompt": [9, 8, 7] * 20, "model": "one", "n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": [11, 12], "n": 3, "use_beam_search": True},
        {"prompt_embeds": embeds},
        {"prompt_embeds": embeds, "model": "two"},
        {"prompt": [9, 8, 7] * 9, "n": 4, "temperature": 1.0, "seed": 1, "prompt_logprobs": 1},
        {"prompt": [4], "structured_outputs": {"regex": "([a-z]{3,9} ){5}[a-z]+"}, "logprobs": 2},
        {"prompt": [6], "structured_outputs": {"grammar": 'root ::= ("ab" | "cd" root){9}'}},
    ]
    pooled: list[Request] = [
        ("/v1/embeddings", {"input": [list(range(5, 120)), [7, 8, 9]]}),
        ("/v1/embeddings", {"input": "seven wizards brew", "model": "three"}),
        ("/v1/embeddings", {"messages": chats[0]["messages"]}),
        ("/pooling", {"input": [list(range(5, 120)), [7, 8, 9]], "task": "token_embed"}),
        ("/v1/rerank", {"query": "the quick", "documents": ["brown fox", "seven wizards"]}),
    ]
    return [
        *(("/v1/chat/completions", each | _LENGTH | _own(each)) for each in chats),
        *(("/v1/completions", _LENGTH | {"return_token_ids": True} | each) for each in prompts),
        *pooled,
    ]


def _own(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a sampled request that `_LENGTH` must not replace."""
    return {key: body[key] for key in ("temperature",) if body[key]}


def speech_requests(count: int, seconds: float) -> list[Request]:
    """Return transcriptions of random tones, with the times of words and without."""
    found: list[Request] = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        times = np.arange(int(16_000 * seconds / 9)) / 16_000
        tones = [np.sin(2 * np.pi * hz * times) for hz in random.uniform(100, 4000, 9)]
        file = io.BytesIO()
        soundfile.write(file, 0.3 * np.concatenate(tones), 16_000, format="WAV", subtype="PCM_16")
        fields = {"language": "en", "seed": str(seed)}
        if seed % 2:
            fields |= {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        found.append(("/v1/audio/transcriptions", _form(fields, file.getvalue())))
    return found


def _form(fields: dict[str, str], file: bytes) -> bytes:
    """Return a form with fields and a file."""
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return "".join([*parts, head]).encode() + file + f"\r\n--{_BOUNDARY}--\r\n".encode()


def answers(
    server: Server, sent: Sequence[Request], may_retry: Callable[[], bool] = lambda: False
) -> list[Any]:
    """Return the results of requests that are sent together.

    A cut connection is an error, unless `may_retry` says that its frontend was crashed.
    """

    def ask(request: Request) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return _ask(server, request)
            except Refused as error:
                found, can_retry = error.args, error.args[0] in (500, 503)
            except (OSError, http.client.HTTPException, WebSocketException) as error:
                found, can_retry = (repr(error),), True
            if not can_retry or not may_retry() or time.monotonic() > deadline:
                return {"error": found}
            time.sleep(0.1)

    with concurrent.futures.ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(ask, sent))


def _ask(server: Server, request: Request) -> Any:
    if callable(request):
        return {"read": request(server)}
    path, body = request
    form = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    status, answer = server.post(path, body, headers=form if isinstance(body, bytes) else None)
    if status != 200:
        raise Refused(status, answer)
    for choice in answer.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return {key: answer[key] for key in _RESULTS if key in answer}
