"""Encoder-decoder models with classification heads give the classes of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine import LLM
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)
_SIZES = {"vocab_size": 97, "d_model": 48, "num_labels": 3, "pad_token_id": 0}
_BART = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 100,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "decoder_start_token_id": 3,
    "forced_bos_token_id": 2,
}
_T5 = {
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "n_positions": 100,
    "decoder_start_token_id": 0,
}
MODELS = {
    # Requests are preempted and resumed, and prompts are read in several steps.
    "BartForSequenceClassification": (
        _BART,
        ("--inject-preemption", "0.1", "--max-num-batched-tokens", "16"),
    ),
    "MvpForSequenceClassification": (_BART, ("-pp", "2")),
    # The prompt of the decoder begins with the last token of a text, its language.
    "MBartForSequenceClassification": (_BART, ("-tp", "2")),
    "PLBartForSequenceClassification": (_BART, ()),
    "T5ForSequenceClassification": (_T5, ("-tp", "2", "--cpu-backend", "torch")),
    "MT5ForSequenceClassification": (_T5, ()),
    "UMT5ForSequenceClassification": (_T5, ("-tp", "2")),
    "T5ForTokenClassification": (_T5, ()),
    "UMT5ForTokenClassification": (_T5, ("-tp", "2")),
}
# The heads of transformers read the place of the last token with this id.
TEXTS = [[2, 9, 8, 7, 1], [2, *range(10, 60), 1], [5, 1, 90], [2, 9, 8, 7, 1, 91]]


def _directory(path: Path, name: str) -> transformers.PreTrainedModel:
    model_class = getattr(transformers, name)
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**_SIZES, **MODELS[name][0])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_classes_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = _directory(tmp_path, name)
    of_tokens = "Token" in name
    with torch.inference_mode():
        expected = [model(torch.tensor([text])).logits[0].softmax(-1).numpy() for text in TEXTS]
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    limits = ("--skip-tokenizer-init", "--max-num-seqs", "4")
    with Server(str(tmp_path), *flags, *limits, *MODELS[name][1]) as server:

        def ask(index: int) -> None:
            route = "/pooling" if of_tokens else "/classify"
            status, answer = server.post(route, {"input": TEXTS[index]})
            assert status == 200, answer
            [entry] = answer["data"]
            found = entry["data"] if of_tokens else entry["probs"]
            np.testing.assert_allclose(found, expected[index], atol=1e-5)
            # The decoder reads as many tokens as end with the last place of the end token.
            text = TEXTS[index]
            num_read = len(text) if of_tokens else text.index(1) + 1
            assert answer["usage"]["prompt_tokens"] == num_read

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, [*range(len(TEXTS))] * 3))
        status, answer = server.post("/classify", {"input": [5] * 200})
        assert status == 400, answer
        if not of_tokens:
            assert "reads at most" in answer["error"]["message"], answer
            status, answer = server.post("/v1/completions", {"prompt": [5, 1]})
            assert status == 400 and "is a classifier" in answer["error"]["message"], answer
        assert_nothing_is_held(server)


def test_texts_are_classified_offline(tmp_path: Path) -> None:
    model = _directory(tmp_path, "BartForSequenceClassification")
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True) as llm:
        outputs = llm.classify([{"prompt_token_ids": text} for text in TEXTS])
    for text, output in zip(TEXTS, outputs, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-5)
        assert list(output.prompt_token_ids) == text
