"""Encoders that only transformers has are served as all others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine import LLM
from engine.protocol.errors import EngineError
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)
_BIG_BIRD = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "block_size": 4,
    "num_random_blocks": 1,
    "num_labels": 3,
}
_XLNET = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layer": 2,
    "n_head": 6,
    "d_inner": 80,
    "d_head": 8,
    "num_labels": 3,
}
# BigBird has another attention for long texts than for short ones.
TEXTS = [[2, 9, 8, 7, 1], [2, *range(10, 97), 1], [5, 1, 90], [*range(2, 97), 1, 91]]


def _directory(path: Path, name: str, values: dict[str, Any]) -> Any:
    model_class = getattr(transformers, name)
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**values)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(path)
    return model


def _logits(path: Path, name: str, text: list[int]) -> torch.Tensor:
    model = getattr(transformers, name).from_pretrained(path).eval()
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("BigBirdForSequenceClassification", ("-tp", "2")),
        ("BigBirdForTokenClassification", ("--inject-preemption", "0.1")),
    ],
)
def test_classes_equal_those_of_transformers(
    tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    _directory(tmp_path, name, _BIG_BIRD)
    of_tokens = "Token" in name
    expected = [_logits(tmp_path, name, text).softmax(-1).numpy() for text in TEXTS]
    limits = ("--skip-tokenizer-init", "--max-num-seqs", "3", "--device", DEVICE)
    with Server(str(tmp_path), *limits, *flags) as server:

        def ask(index: int) -> None:
            route = "/pooling" if of_tokens else "/classify"
            status, answer = server.post(route, {"input": TEXTS[index]})
            assert status == 200, answer
            [entry] = answer["data"]
            found = entry["data"] if of_tokens else entry["probs"]
            np.testing.assert_allclose(found, expected[index], atol=1e-5)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, [*range(len(TEXTS))] * 3))
        status, answer = server.post("/v1/completions", {"prompt": [5, 1]})
        assert status == 400 and "is a classifier" in answer["error"]["message"], answer
        assert_nothing_is_held(server)


def test_the_last_token_of_xlnet_is_pooled(tmp_path: Path) -> None:
    model = _directory(tmp_path, "XLNetModel", _XLNET)
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        found = llm.embed([{"prompt_token_ids": text} for text in TEXTS])
    for text, output in zip(TEXTS, found, strict=True):
        types = torch.tensor([[0] * (len(text) - 1) + [2]])
        with torch.inference_mode():
            last = model(torch.tensor([text]), token_type_ids=types).last_hidden_state[0, -1]
        wanted = torch.nn.functional.normalize(last, dim=0)
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)


def test_characters_are_embedded_and_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    values = {**sizes, "num_attention_heads": 6, "max_position_embeddings": 64}
    model = _directory(tmp_path, "CanineModel", {**values, "num_hash_buckets": 80})
    text = [57344, 104, 0x10FFFF, 57345]
    with LLM(str(tmp_path), skip_tokenizer_init=True) as llm:
        (found,) = llm.embed([{"prompt_token_ids": text}])
    with torch.inference_mode():
        first = model(torch.tensor([text])).last_hidden_state[0, 0]
    wanted = torch.nn.functional.normalize(first, dim=0)
    np.testing.assert_allclose(found.outputs.embedding, wanted, atol=1e-5)
    overrides = {"architectures": ["CanineForSequenceClassification"]}
    with pytest.raises(EngineError, match="2 tensors of the model are missing, such as"):
        LLM(str(tmp_path), skip_tokenizer_init=True, hf_overrides=overrides)
