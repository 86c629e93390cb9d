"""Classification heads over HTTP and offline: cross-encoders, classifiers, decoders that answer yes or no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from gguf import PoolingType
from support.checkpoints.tiny import qwen3_directory
from support.checkpoints.words_bert import bert_directory
from support.gguf.bert import write_bert
from support.gguf.reranker import write_reranker
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.sampled

QUERY = "seven wizards"
DOCUMENTS = (
    "the quick brown fox",
    "wizards brew tea in the old tower while seven foxes jump over the lazy dog",
    "tea",
    "fox " * 60,
)
TEMPLATE = (
    "{% for m in messages %}{{ '<q>' if m.role == 'query' else '<d>' }}{{ m.content }}{% endfor %}"
    "{{ instruction | default('which') }}"
)


@pytest.fixture(scope="module")
def cross_encoder(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, transformers.PreTrainedModel]:
    return bert_directory(tmp_path_factory.mktemp("cross-encoder"), 1)


@pytest.fixture(scope="module")
def server(cross_encoder: tuple[Path, Any]) -> Iterator[Server]:
    with Server(str(cross_encoder[0]), "--served-model-name", "ce") as server:
        yield server
        assert server.stop() == 0, server.log


def pair_scores(model: Any, path: Path, max_length: int | None = None) -> list[float]:
    """Return the scores of transformers for the query and each document."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    scores = []
    for document in DOCUMENTS:
        options = {} if max_length is None else {"truncation": True, "max_length": max_length}
        encoded = tokenizer(
            QUERY, document, return_tensors="pt", return_token_type_ids=True, **options
        )
        with torch.inference_mode():
            scores.append(torch.sigmoid(model(**encoded).logits[0, 0]).item())
    return scores


def score(server: Server, **body: Any) -> list[float]:
    status, answer = server.post("/v1/score", body)
    assert status == 200, answer
    return [entry["score"] for entry in answer["data"]]


def test_a_cross_encoder_reads_both_texts(server: Server, cross_encoder: tuple[Path, Any]) -> None:
    path, model = cross_encoder
    expected = pair_scores(model, path)
    assert max(expected) - min(expected) > 1e-2
    found = score(server, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # A score does not depend on other requests, and survives the crash of a process.
    for victim in ("worker 0", "core 0"):
        process: psutil.Process = server.child(victim)
        process.kill()
        assert [score(server, text_1=QUERY, text_2=text)[0] for text in DOCUMENTS] == found
    status, answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert status == 200, answer
    assert [result["index"] for result in answer["results"]] == sorted(
        range(len(found)), key=lambda i: -found[i]
    )
    logits = score(server, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(logits))), expected, atol=1e-5)
    with LLM(str(path)) as llm:
        outputs = llm.score(QUERY, DOCUMENTS)
        assert [output.outputs.score for output in outputs] == found
        [alone] = llm.classify(QUERY)
        assert alone.outputs.num_classes == 1 and alone.outputs.label == "LABEL_0"
        with pytest.raises(ParameterError, match="is a classifier"):
            llm.embed("a")
    assert_nothing_is_held(server)


def test_long_pairs_lose_the_end_of_the_longer_text(
    server: Server, cross_encoder: tuple[Path, Any]
) -> None:
    path, model = cross_encoder
    for most in (4, 8, 12):
        found = score(server, text_1=QUERY, text_2=DOCUMENTS, truncate_prompt_tokens=most)
        np.testing.assert_allclose(found, pair_scores(model, path, most), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": "a"}, "model", "ce is a classifier, which does not embed"),
        ("/v1/completions", {"prompt": "a"}, "prompt", "ce is a classifier; use /classify"),
        ("/v1/score", {"text_1": "a", "text_2": "fox " * 140}, "text_1", "reads at most 128"),
        ("/classify", {}, "input", "required"),
        ("/classify", {"input": "fox " * 140}, "input", "reads at most 128"),
        (
            "/pooling",
            {"input": "a", "task": "embed"},
            "task",
            'must be "classify" or "token_classify", got "embed"',
        ),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"instruction": "c"}},
            "chat_template_kwargs",
            "without a template",
        ),
    ],
)
def test_classifier_rejects_unsupported_requests(
    server: Server, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_texts_are_classified(tmp_path: Path) -> None:
    path, model = bert_directory(tmp_path, 3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        expected = [
            model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0).tolist()
            for text in DOCUMENTS
        ]
    with Server(str(path)) as server:
        status, answer = server.post("/classify", {"input": DOCUMENTS})
        assert status == 200, answer
        for entry, probabilities in zip(answer["data"], expected, strict=True):
            np.testing.assert_allclose(entry["probs"], probabilities, atol=1e-5)
            assert entry["label"] == ("good", "bad", "neither")[int(np.argmax(probabilities))]
            assert entry["num_classes"] == 3
        assert server.post("/v1/classify", {"input": DOCUMENTS})[1]["data"] == answer["data"]
        status, pooled = server.post("/pooling", {"input": DOCUMENTS})
        assert [e["data"] for e in pooled["data"]] == [e["probs"] for e in answer["data"]]
        status, answer = server.post("/v1/score", {"text_1": "a", "text_2": "b"})
        assert status == 400 and "3 classes" in answer["error"]["message"]
        assert server.capabilities() == (["classification"], ["classification"])


def test_a_decoder_that_answers_yes_or_no_reranks(tmp_path: Path) -> None:
    path, model = qwen3_directory(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    no, yes = tokenizer.encode("fox", add_special_tokens=False)[:1], [7]
    tokens = tokenizer.convert_ids_to_tokens(no + yes)
    expected = []
    for document in DOCUMENTS:
        prompt = tokenizer.encode(f"<q>{QUERY}<d>{document}why", add_special_tokens=False)
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([prompt])).logits[0, -1, no + yes]
        expected.append(logits.softmax(0)[1].item())
    overrides = {"classifier_from_token": tokens}
    with LLM(str(path), dtype="float32", hf_overrides=overrides, chat_template=TEMPLATE) as llm:
        found = llm.score(QUERY, DOCUMENTS, chat_template_kwargs={"instruction": "why"})
    np.testing.assert_allclose([each.outputs.score for each in found], expected, atol=1e-5)
    template = "<q>{query}<d>{document}why"
    file = write_reranker(tmp_path / "tiny.gguf", model, tokenizer, yes[0], no[0], template)
    with LLM(str(file), dtype="float32") as llm:
        found = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose([each.outputs.score for each in found], expected, atol=1e-5)


def test_a_gguf_file_of_a_cross_encoder_gives_the_same_scores(tmp_path: Path) -> None:
    source, _ = bert_directory(tmp_path / "bert", 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    torch.manual_seed(3)
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=130,
        type_vocab_size=1,
        num_labels=1,
        pad_token_id=0,
    )
    model = transformers.XLMRobertaForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    path = write_bert(tmp_path / "tiny.gguf", model, tokenizer, PoolingType.RANK)
    with LLM(str(tmp_path / "saved")) as llm:
        expected = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
    assert max(expected) - min(expected) > 1e-2
    with LLM(str(path)) as llm:
        found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
