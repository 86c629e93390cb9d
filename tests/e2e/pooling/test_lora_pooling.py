"""LoRA adapters of models that embed, classify and rerank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine import LoRARequest
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import EngineError
from support.checkpoints.lora_adapters import write_adapter
from support.checkpoints.tiny import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.checkpoints.words_bert import bert_directory
from support.servers.server import Server

QUERY = "seven wizards"
DOCUMENTS = ["the quick brown fox", "wizards brew tea in the old tower", "tea"]


def probabilities(model: Any, path: Path, *texts: str) -> np.ndarray:
    """Return the scores of transformers between 0 and 1: of a text, or of a pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    encoded = tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)
    with torch.inference_mode():
        logits = model(**encoded).logits[0]
    return (logits.sigmoid() if len(logits) == 1 else logits.softmax(0)).numpy()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_cross_encoder_ranks_with_the_layers_and_the_head_of_the_adapter(
    tmp_path: Path, backend: str
) -> None:
    path, model = bert_directory(tmp_path / "base", 1)
    layers, head = r".*(query|value|dense)", "classifier"
    models = {
        "ce": model,
        "layers": write_adapter(tmp_path / "layers", model, 1, r".*(query|value)"),
        "both": write_adapter(tmp_path / "both", model, 2, layers, whole=head),
    }
    modules = [f"{name}={tmp_path / name}" for name in ("layers", "both")]
    flags = ("--served-model-name", "ce", "--cpu-backend", backend, "--enable-lora")
    with Server(str(path), *flags, "--max-loras", "2", "--lora-modules", *modules) as server:
        found = []
        for name, merged in models.items():
            body = {"model": name, "query": QUERY, "documents": DOCUMENTS}
            status, answer = server.post("/v1/rerank", body)
            assert status == 200 and answer["model"] == name, answer
            scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
            expected = [probabilities(merged, path, QUERY, text)[0] for text in DOCUMENTS]
            np.testing.assert_allclose([scores[i] for i in range(3)], expected, atol=1e-5)
            found.append(expected)
        assert len(np.unique(np.round(found, 4), axis=0)) == len(models)
        status, answer = server.post("/v1/rerank", {**body, "model": "other"})
        assert status == 404


def test_a_decoder_classifies_and_embeds_with_an_adapter(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    settings = QWEN3 | {"num_labels": 3}
    classifier = random_model("Qwen3Config", "Qwen3ForSequenceClassification", settings, tokenizer)
    path = tmp_path / "classifier"
    classifier.save_pretrained(path)
    tokenizer.save_pretrained(path)
    merged = write_adapter(tmp_path / "adapter", classifier, 1, whole="score")
    write_adapter(tmp_path / "dora", classifier, 1, use_dora=True)
    text = "seven wizards brew tea"
    with LLM(str(path), dtype="float32", enable_lora=True) as llm:
        adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        for each, lora in ((classifier, None), (merged, adapter)):
            (output,) = llm.classify(text, lora_request=lora)
            expected = probabilities(each, path, text)
            np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-5)
        with pytest.raises(EngineError, match="use_dora True is not supported"):
            llm.classify(text, lora_request=LoRARequest("dora", 2, str(tmp_path / "dora")))
    path, model = qwen3_directory(tmp_path / "base")
    merged = write_adapter(tmp_path / "embeds", model, 3, r".*(_proj|embed_tokens)")
    flags = ("--dtype", "float32", "--enable-lora", "--served-model-name", "tiny")
    modules = f"embeds={tmp_path / 'embeds'}"
    with Server(str(path), *flags, "--lora-modules", modules) as server:
        ids = [5, 9, 33, 7]
        for name, each in (("tiny", model), ("embeds", merged)):
            status, answer = server.post("/v1/embeddings", {"model": name, "input": ids})
            assert status == 200 and answer["model"] == name, answer
            with torch.inference_mode():
                hidden = each.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
            np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)


TASKS = ("retrieval", "text-matching", "clustering")


def task_directory(path: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    """Write a tiny jina-embeddings-v5, and return its tokenizer and the model of each task."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model(f"{kind}Config", f"{kind}Model", QWEN3, tokenizer)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    fields = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5"}
    fields |= {"task_names": TASKS} | ({} if kind == "Qwen3" else {"is_decoder": False})
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    (path / "modules.json").write_text(json.dumps([module | {"kwargs": ["task"]}]))
    prompts = {"query": "Query: ", "document": "Document: "}
    prompts_file = path / "config_sentence_transformers.json"
    prompts_file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "document"}))
    # The ranks are higher than the default of --max-lora-rank.
    return tokenizer, {
        task: write_adapter(path / "adapters" / task, model, seed, r=20)
        for seed, task in enumerate(TASKS)
    }


def embedded(model: Any, tokenizer: Any, text: str) -> np.ndarray:
    """Return the normalized last hidden state of transformers."""
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden, dim=0).numpy()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", ["Qwen3", "EuroBert"])
def test_a_model_with_adapters_for_tasks_embeds_for_the_task_that_is_named(
    tmp_path: Path, kind: str, backend: str
) -> None:
    tokenizer, models = task_directory(tmp_path / "jina", kind)
    flags = ("--dtype", "float32", "--cpu-backend", backend, "--served-model-name", "jina")
    with Server(str(tmp_path / "jina"), *flags) as server:
        _, listed = server.get("/v1/models")
        assert [each["id"] for each in listed["data"]] == ["jina", *TASKS]
        found = []
        for name, task in [("jina", "retrieval"), *zip(TASKS, TASKS, strict=True)]:
            for prompt, prefix in (("query", "Query: "), (None, "Document: ")):
                body = {"model": name, "input": QUERY, "prompt_name": prompt}
                status, answer = server.post("/v1/embeddings", body)
                assert status == 200 and answer["model"] == name, answer
                found.append(embedded(models[task], tokenizer, prefix + QUERY))
                vector = answer["data"][0]["embedding"]
                np.testing.assert_allclose(vector, found[-1], atol=1e-5)
        assert len(np.unique(np.round(found, 3), axis=0)) == 2 * len(TASKS)
        for task, prefix in (
            ("retrieval.query", "Query: "),
            ("retrieval.passage", "Document: "),
            ("clustering", "Document: "),
        ):
            body = {"model": "jina", "input": QUERY, "task": task}
            status, answer = server.post("/v1/embeddings", body)
            assert status == 200, answer
            expected = embedded(models[task.partition(".")[0]], tokenizer, prefix + QUERY)
            np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)
        for changed, code, reason in (
            ({"task": "separation"}, 400, "task must be one of retrieval, "),
            ({"model": "clustering"}, 400, "task cannot be used with the adapter"),
            ({"model": "other"}, 404, "does not exist"),
        ):
            status, answer = server.post("/v1/embeddings", body | changed)
            assert status == code and reason in answer["error"]["message"], answer


def test_the_task_of_requests_that_name_none_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "jina"
    tokenizer, models = task_directory(path, "Qwen3")
    chosen: dict[str, Any] = {"dtype": "float32", "hf_overrides": {"jina_task": "clustering"}}
    with LLM(str(path), **chosen) as llm:
        for lora, task in ((None, "clustering"), ("retrieval", "retrieval")):
            (output,) = llm.embed(QUERY, lora_request=lora)
            expected = embedded(models[task], tokenizer, f"Document: {QUERY}")
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
    with pytest.raises(
        EngineError, match=r"jina_task must be one of retrieval, .* got 'separation'"
    ):
        LLM(str(path), hf_overrides={"jina_task": "separation"})
    (path / "adapters" / "clustering" / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"clustering: .* has no adapter_model.safetensors"):
        LLM(str(path))
