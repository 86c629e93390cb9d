"""LoRA adapters of models that embed, classify and rerank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine import LoRARequest
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import EngineError
from support.lora_adapters import write_adapter
from support.server import Server
from support.tiny_checkpoints import QWEN3, qwen3_directory, random_model, sentencepiece_tokenizer
from support.words_bert import bert_directory

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
