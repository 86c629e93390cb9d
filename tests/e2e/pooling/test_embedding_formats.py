"""Formats of embeddings: vLLM's bytes and chunks, inputs of llama.cpp's clients, and projections in a model's file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.servers.server import Server

TEXTS = ("hello world", "The quick brown fox", "a")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path, _ = qwen3_directory(tmp_path_factory.mktemp("qwen3"))
    with Server(str(path), "--served-model-name", "tiny") as server:
        yield server


def embed(server: Server, given: Any) -> list[list[float]]:
    status, answer = server.post("/v1/embeddings", {"input": given})
    assert status == 200, answer
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize(
    ("encoding_format", "embed_dtype", "dtype"),
    [
        ("bytes", None, "<f4"),
        ("bytes", "float16", ">f2"),
        ("bytes_only", "bfloat16", "<u2"),
        ("bytes", "fp8_e4m3", "<u1"),
        ("bytes_only", "fp8_e5m2", ">u1"),
    ],
)
def test_the_body_has_the_bytes_of_all_vectors(
    server: Server, encoding_format: str, embed_dtype: str | None, dtype: str
) -> None:
    options = {"encoding_format": encoding_format, "embed_dtype": embed_dtype}
    options["endianness"] = "big" if dtype[0] == ">" else "little"
    vectors = embed(server, list(TEXTS))
    float8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    name = embed_dtype or "float32"
    expected = torch.tensor(vectors).to(float8[name] if name in float8 else getattr(torch, name))
    for path in ("/v1/embeddings", "/pooling"):
        response = httpx.post(server.url + path, json=options | {"input": TEXTS})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/octet-stream"
        found = np.frombuffer(response.content, dtype).astype(dtype[1:])
        raw = torch.from_numpy(found).view(expected.dtype).reshape(expected.shape)
        assert torch.equal(raw.float(), expected.float())
        assert ("metadata" in response.headers) == (encoding_format == "bytes")
        if encoding_format == "bytes":
            metadata = json.loads(response.headers["metadata"])
            last = metadata["data"][-1]
            assert (last["index"], last["end"]) == (len(TEXTS) - 1, len(response.content))
            assert last["shape"] == [expected.shape[1]]
            assert last["embed_dtype"] == (embed_dtype or "float32")
            assert metadata["usage"]["prompt_tokens"] and metadata["model"] == "tiny"


def test_chunks_of_a_text_have_the_means_of_their_tokens(server: Server) -> None:
    text = TEXTS[1]
    body = {"input": text, "use_activation": False}
    _, tokens = server.post("/pooling", {**body, "task": "token_embed"})
    tokens_TD = np.array(tokens["data"][0]["data"])
    status, answer = server.post(
        "/v1/embeddings", {**body, "late_chunking_params": {"chunk_size": 3}}
    )
    assert status == 200, answer
    [each] = answer["data"]
    starts = range(0, len(tokens_TD), 3)
    expected = [tokens_TD[start : start + 3].mean(0) for start in starts]
    np.testing.assert_allclose(each["embedding"], expected, atol=1e-6)
    chunks = each["late_chunking"]["chunks"]
    ranges = [[start, min(start + 3, len(tokens_TD))] for start in starts]
    assert [chunk["token_range"] for chunk in chunks] == ranges
    places = [chunk["char_range"] for chunk in chunks if chunk["char_range"] is not None]
    assert (places[0][0], places[-1][1]) == (0, len(text))


def test_inputs_are_read_in_the_formats_of_llama_cpp(server: Server) -> None:
    [vector] = embed(server, TEXTS[0])
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    given = [TEXTS[0], {"prompt_string": TEXTS[0]}, {"content": parts}]
    assert embed(server, given) == [vector] * 3
    assert embed(server, given[2]) == [vector]
    # A list with a token id is one input.
    first, second = (server.post("/tokenize", {"content": text})[1]["tokens"] for text in TEXTS[:2])
    [joined] = embed(server, [[*first, *second]])
    assert embed(server, [*first, TEXTS[1]]) == [joined]
    status, answer = server.post("/embedding", {"content": [[*first, TEXTS[1]], TEXTS[0]]})
    assert status == 200
    assert [each["embedding"] for each in answer] == [[joined], [vector]]
    assert server.post("/embeddings", {"content": TEXTS[0]})[1] == [
        {"index": 0, "embedding": [vector]}
    ]


def _chunks(given: str | list[int], params: dict[str, int]) -> dict[str, Any]:
    return {"input": given, "late_chunking_params": params}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": {"content": "a"}}, "input.content", 'array, got "a"'),
        ({"input": ["a", {"content": [{"type": "x"}]}]}, "input[1].content", "reads only text"),
        ({"input": ["a", {"text": "a"}]}, "input[1].prompt_string", "must be a string"),
        ({"input": [[5, "a"], ["a", 10_000_000]]}, "input[1][1]", "must be a token id in [0, "),
        ({"input": [5, "a", {}]}, "input[2]", "must be a token id in [0, "),
        ({"input": ["a"] * 400, "encoding_format": "bytes"}, "encoding_format", '"bytes_only"'),
        (_chunks("a", {}), "late_chunking_params.chunk_size", "is required"),
        (_chunks("a", {"chunk_size": 0}), "late_chunking_params.chunk_size", ">= 1, got 0"),
        (_chunks([5, 6], {"chunk_size": 1}), "late_chunking_params", "needs a text"),
    ],
)
def test_bad_input_is_named(server: Server, body: dict[str, Any], param: str, message: str) -> None:
    status, answer = server.post("/v1/embeddings", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


def test_an_own_file_may_have_the_projection_of_a_pooled_vector(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    fields = QWEN3 | {"is_causal": False}
    model = random_model("Qwen3Config", "Qwen3Model", fields, tokenizer).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    projection = torch.randn(24, model.config.hidden_size)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors | {"linear.weight": projection}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["VoyageQwen3BidirectionalEmbedModel"], "num_labels": 24}
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": None}))
    prompts = [[7, 8, 9], [*range(10, 110)]]
    with Server(str(tmp_path)) as server:
        found = embed(server, prompts)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(projection @ mean, dim=0)
        np.testing.assert_allclose(vector, expected, atol=1e-4)
