"""ModernVBERT with a classification head classifies texts and their tokens as in transformers."""

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
TEXTS = [[2, 9, 8, 7, 1], [2, *range(10, 97), 1], [5, 1, 90]]


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("ForSequenceClassification", {"classifier_pooling": "mean"}),
        ("ForSequenceClassification", {"problem_type": "multi_label_classification"}),
        ("ForTokenClassification", {}),
    ],
)
def test_classes_equal_those_of_transformers(
    tmp_path: Path, name: str, differences: dict[str, Any]
) -> None:
    ends = {f"{each}_token_id": None for each in ("bos", "eos", "cls", "sep")}
    text = _TEXT | ends | {"pad_token_id": 0, "model_type": "modernbert"}
    config = transformers.ModernVBertConfig(
        text_config=text,
        vision_config=_VISION,
        image_token_id=95,
        pixel_shuffle_factor=4,
        id2label={0: "a", 1: "b", 2: "c"},
        **differences,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"ModernVBert{name}")(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(tmp_path)
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
