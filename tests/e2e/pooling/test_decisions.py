"""A Decision 3.0 scores the codes of answers to a question about texts and images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine import LLM
from engine.protocol.errors import CheckpointError
from safetensors.torch import save_file
from support.media.image_requests import chat, picture
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.qwen import qwen_directory, qwen_image_processor

torch.set_num_threads(1)

CODES = ("A", "B", "C", "D", "E")
TEXTS = [[5, 6, 7, 8, 9, 10] * 9, [20, 30, 40] * 6, [5, 6, 7, 8, 9, 10] * 9 + [11]]


def write_decisions(path: Path, **changes: Any) -> None:
    """Write the file that describes the codes."""
    fields = {"format_version": 1, "codes": CODES, "token_ids": [*range(len(CODES))]}
    (path / "decision_config.json").write_text(json.dumps(fields | changes))


def decision_directory(path: Path, mode: str) -> tuple[Any, torch.Tensor]:
    """Write a tiny model. Return transformers' model without a head, and the rows of the codes."""
    _, whole = qwen_directory(path, "qwen3_5")
    model = whole.model
    model.save_pretrained(path)
    torch.manual_seed(3)
    rows = torch.randn(len(CODES), model.config.text_config.hidden_size)
    save_file({"weight": rows}, path / "readout.safetensors")
    write_decisions(path, attention_mode=mode)
    text = model.language_model
    text.config.is_causal = mode == "causal"
    for layer in text.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.is_causal = mode == "causal"
    return model, rows


def expected_scores(model: Any, rows: torch.Tensor, ids: list[int], **images: Any) -> np.ndarray:
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), **images).last_hidden_state
    return (hidden[0, -1] @ rows.T).numpy()


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("causal", ("--inject-preemption", "0.1")),
        ("noncausal_full_attention", ()),
        ("noncausal_full_attention", ("--cpu-backend", "torch", "-tp", "2")),
    ],
)
def test_scores_equal_those_of_transformers(
    tmp_path: Path, mode: str, flags: tuple[str, ...]
) -> None:
    model, rows = decision_directory(tmp_path, mode)
    expected = [expected_scores(model, rows, ids) for ids in TEXTS]
    shared = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    with Server(str(tmp_path), *shared, *flags) as server:
        for _ in range(2):
            status, answer = server.post("/classify", {"input": TEXTS})
            assert status == 200, answer
            for entry, scores in zip(answer["data"], expected, strict=True):
                np.testing.assert_allclose(entry["probs"], scores, atol=1e-4)
                assert entry["label"] == CODES[scores.argmax()]
        # The file of the image processor allows fewer pixels.
        image = picture(1, 200, 100)
        processor = qwen_image_processor(tmp_path)
        processor.size = {"shortest_edge": 65_536, "longest_edge": 1_638_400}
        inputs = dict(processor([image], return_tensors="pt"))
        body = {"messages": chat(image, "which")["messages"], "add_generation_prompt": True}
        status, answer = server.post("/tokenize", body)
        assert status == 200, answer
        ids = answer["tokens"]
        is_image = (torch.tensor([ids]) == model.config.image_token_id).int()
        scores = expected_scores(model, rows, ids, mm_token_type_ids=is_image, **inputs)
        status, answer = server.post("/classify", body)
        assert status == 200, answer
        np.testing.assert_allclose(answer["data"][0]["probs"], scores, atol=1e-4)
        assert_nothing_is_held(server)


def test_unknown_descriptions_of_codes_are_refused(tmp_path: Path) -> None:
    decision_directory(tmp_path, "causal")
    for changes, message in (
        ({"format_version": 2}, "format_version"),
        ({"pooling": "mean"}, "pooling"),
        ({"attention_mode": "both"}, "attention_mode"),
        ({"token_ids": [1]}, "one token for each of 5 codes, got 1"),
    ):
        write_decisions(tmp_path, **changes)
        with pytest.raises(CheckpointError, match=message):
            LLM(str(tmp_path))
