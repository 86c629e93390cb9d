"""ModernVBERT and UltraVBERT classify and embed texts and their tokens as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine import LLM

torch.set_num_threads(1)
_SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
_TEXT = _SIZES | {"vocab_size": 97, "num_attention_heads": 6, "max_position_embeddings": 256}
_VISION = _SIZES | {"num_attention_heads": 4, "image_size": 32, "patch_size": 4}
_KINDS: dict[str, dict[str, Any]] = {
    "ModernVBert": {"model_type": "modernbert"},
    "UltraVBert": {"model_type": "ultrabert", "num_key_value_heads": 2, "sliding_window": 21},
}
TEXTS = [[2, 9, 8, 7, 1], [2, *range(10, 94), 96, 1], [5, 1, 90]]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("ForSequenceClassification", {"classifier_pooling": "mean"}),
        ("ForSequenceClassification", {"problem_type": "multi_label_classification"}),
        ("ForTokenClassification", {}),
    ],
)
def test_classes_equal_those_of_transformers(
    tmp_path: Path, kind: str, name: str, differences: dict[str, Any]
) -> None:
    model = _write(tmp_path, kind, name, differences)
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        prompts = [{"prompt_token_ids": each} for each in TEXTS]
        if "Token" in name:
            found = [each.outputs.data for each in llm.encode(prompts)]
        else:
            found = [each.outputs.probs for each in llm.classify(prompts)]
    for each, probabilities in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([each])).logits[0]
        is_alone = "problem_type" in differences
        expected = logits.sigmoid() if is_alone else logits.softmax(-1)
        np.testing.assert_allclose(probabilities, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["Model", "ForMaskedLM"])
def test_embeddings_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = _write(tmp_path, "UltraVBert", name, {})
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        found = [
            each.outputs.embedding for each in llm.embed([{"prompt_token_ids": x} for x in TEXTS])
        ]
    for each, embedding in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([each])).last_hidden_state[0, 0]
        np.testing.assert_allclose(embedding, hidden / hidden.norm(), atol=1e-5)


def _write(path: Path, kind: str, name: str, differences: dict[str, Any]) -> Any:
    ends = {f"{each}_token_id": None for each in ("bos", "eos", "cls", "sep")}
    config = getattr(transformers, f"{kind}Config")(
        text_config=_TEXT | ends | {"pad_token_id": 0} | _KINDS[kind],
        vision_config=_VISION,
        image_token_id=95,
        pixel_shuffle_factor=4,
        id2label={0: "a", 1: "b", 2: "c"},
        **differences,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}{name}")(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(path)
    return model
