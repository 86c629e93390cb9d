"""Encoders that transformers computes give its results, whatever texts came before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.protocol.arrays import int32_bytes
from engine.protocol.checkpoint.pooling.foreign_encoders import read_foreign_encoder
from engine.protocol.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.protocol.errors import EngineError
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData
from engine.workers.device.dtypes import HostDevice
from engine.workers.execution.inputs.text_encoder import TextEncoder
from engine.workers.models.foreign.encoder import TransformersEncoder
from transformers.models.mra import modeling_mra

functional = torch.nn.functional
pytestmark = pytest.mark.slow

torch.set_num_threads(1)
_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
}
_XLM = {"emb_dim": 48, "n_layers": 2, "n_heads": 6}
_BIG_BIRD = {"block_size": 4, "num_random_blocks": 1}
_PRONOUNCED = {f"{name}_vocab_size": 9 for name in ("pronunciation", "shape")}
_GEMMA = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_BART = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 6), ("ffn_dim", 80))
}
_REFORMER = {
    "axial_pos_shape": [16, 16],
    "axial_pos_embds_dim": [16, 32],
    "attention_head_size": 8,
    "feed_forward_size": 80,
    "attn_layers": ["lsh", "local"],
    "num_buckets": None,
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "is_decoder": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "BigBird": _BIG_BIRD,
    "BigBirdPegasus": {**_BIG_BIRD, **_BART, "d_model": 48, "eos_token_id": 2},
    "Canine": {"num_hash_buckets": 300},
    "FNet": {},
    "Flaubert": _XLM,
    "Funnel": {"block_sizes": [2, 2], "d_model": 48, "n_head": 6, "d_head": 8, "d_inner": 80},
    "LayoutLM": {},
    "LayoutLMv3": {"coordinate_size": 8, "shape_size": 8, "visual_embed": False},
    "Lilt": {},
    "Longformer": {"attention_window": 8},
    "MarkupLM": {},
    # Eight of 64 pairs of blocks are exact.
    "Mra": {"block_per_row": 1, "initial_prior_diagonal_n_blocks": 0},
    "NeoMME": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "embedding_rank": 32,
        "patch_size": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Nystromformer": {"segment_means_seq_len": 160, "num_landmarks": 8},
    "Perceiver": {
        "d_latents": 48,
        "d_model": 48,
        "num_latents": 7,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 6,
        "num_cross_attention_heads": 6,
    },
    "Reformer": _REFORMER,
    "RoCBert": {**_PRONOUNCED, "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "SqueezeBert": {"embedding_size": 48},
    "T5Gemma": {"encoder": _GEMMA, "decoder": {**_GEMMA, "cross_attention_hidden_size": 48}},
    "T5Gemma2": {
        "encoder": {"text_config": _GEMMA, "vision_config": _VISION, "mm_tokens_per_image": 4},
        "decoder": _GEMMA,
    },
    "Tapas": {},
    "XLM": _XLM,
    "XLNet": {"d_model": 48, "n_layer": 2, "n_head": 6, "d_inner": 80, "d_head": 8},
    "Xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "Yoso": {},
}
"""Name in transformers -> the differences of a small config."""

_HEADS = ("ForSequenceClassification", "ForTokenClassification", "Model")
_WITHOUT = {
    *(f"{name}Model" for name in ("BigBirdPegasus", "Perceiver", "Reformer")),
    *("NeoMMEForSequenceClassification", "T5GemmaModel", "T5Gemma2Model"),
    *(
        f"{name}ForTokenClassification"
        for name in ("BigBirdPegasus", "NeoMME", "Perceiver", "Reformer", "Tapas")
    ),
}
NAMES = [f"{each}{head}" for each in FAMILIES for head in _HEADS if f"{each}{head}" not in _WITHOUT]
_ABSENT = {
    "Funnel": ("num_hidden_layers",),
    **dict.fromkeys(
        ("T5Gemma", "T5Gemma2"),
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    ),
    "XLNet": ("max_position_embeddings",),
}
_WITH_TYPES = {"Funnel": (2, 0), "XLNet": (0, 2)}
_MIN_TOKENS = {"Canine": 4, "Funnel": 8}
_LENGTHS = (1, 8, 150, 37, 8)


def _write(path: Path, name: str) -> Any:
    family = next(each for each in sorted(FAMILIES, key=len, reverse=True) if name.startswith(each))
    model_class = getattr(transformers, name)
    values = {**_SMALL, "num_labels": 3, **FAMILIES[family]}
    for key in _ABSENT.get(family, ()):
        values.pop(key)
    config = model_class.config_class(**values)
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.15)
    model.save_pretrained(path)
    return model


def _mra(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, count: int, **_: Any
) -> torch.Tensor:
    """Return the attention with exact scores in some pairs of blocks, and products of means in others (MRA-2)."""
    scale, block = q.shape[-1] ** -0.5, 32
    mask_T = mask[0]
    q, k = q * mask_T[:, None], k * mask_T[:, None]
    counts = mask_T.unflatten(0, (-1, block)).sum(1)
    means = [x.unflatten(2, (-1, block)).sum(3) / (counts[:, None] + 1e-6) for x in (q, k)]
    coarse = means[0] @ means[1].transpose(-1, -2) * scale
    empty = counts[:, None] * counts < 0.5
    ranked = (coarse - coarse.amax(-1, keepdim=True)).masked_fill(empty, -1e4)
    least = ranked.flatten(2).topk(count).values.amin(-1)[..., None, None]
    is_exact, rough = (
        x.repeat_interleave(block, 2).repeat_interleave(block, 3) for x in (ranked >= least, coarse)
    )
    scores = torch.where(is_exact, q @ k.transpose(-1, -2) * scale, rough)
    scores = scores.masked_fill(mask_T == 0, -1e9)
    return scores.softmax(-1) @ v * mask_T[:, None]


@pytest.mark.parametrize("name", NAMES)
def test_results_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = _write(tmp_path, name)
    options = ModelOptions(model=str(tmp_path), skip_tokenizer_init=True)
    config = resolve_model(options, Console()).config
    assert config.is_encoder and config.max_model_len >= 150
    found = read_foreign_encoder(config)
    assert found is not None
    encoder = TransformersEncoder(
        tmp_path, *found, {}, dtype=torch.float32, device=torch.device("cpu")
    )
    rng = random.Random(1)
    family = name.removesuffix("Model").removesuffix(_HEADS[0]).removesuffix(_HEADS[1])
    for length in _LENGTHS:
        text = [*rng.choices(range(3, 97), k=length - 1), 2]
        inputs = {"input_ids": torch.tensor([text])}
        if family in _WITH_TYPES:
            types = torch.zeros_like(inputs["input_ids"])
            types[0, 0], types[0, -1] = _WITH_TYPES[family]
            inputs["token_type_ids"] = types
        if (filled := _MIN_TOKENS.get(family, 1) - length) > 0:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs = {key: functional.pad(value, (0, filled)) for key, value in inputs.items()}
        if family == "Mra":
            rest = (0, 256 - length)
            mask = functional.pad(torch.ones_like(inputs["input_ids"]), rest)
            inputs = {"attention_mask": mask}
            inputs["input_ids"] = functional.pad(torch.tensor([text]), rest)
        if family == "Nystromformer":
            # It reads texts of one length only.
            rest, none = (0, 160 - length), torch.zeros(1, 1, 1, length)
            inputs["attention_mask"] = functional.pad(none, rest, value=-1e30)
            inputs["input_ids"] = functional.pad(inputs["input_ids"], rest)
        # Texts change the modules of some families, so each is computed by a new one.
        fresh = type(reference).from_pretrained(tmp_path).eval()
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_mra, "mra2_attention", _mra)
            torch.manual_seed(0)
            output = fresh(**inputs)
        expected = output.last_hidden_state if name.endswith("Model") else output.logits
        found_rows = encoder(np.array(text, np.int32))
        wanted = expected[0] if expected[0].ndim == 1 else expected[0, :length]
        torch.testing.assert_close(found_rows, wanted, atol=1e-5, rtol=1e-5)
        size = len(config.classifier.labels) if config.classifier else config.hidden_size
        assert found_rows.shape[-1] == size


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    reference = _write(tmp_path, "SqueezeBertForSequenceClassification")
    options = ModelOptions(model=str(tmp_path), skip_tokenizer_init=True)
    found = read_foreign_encoder(resolve_model(options, Console()).config)
    assert found is not None
    encoder = TransformersEncoder(
        tmp_path, *found, {}, dtype=torch.float32, device=torch.device("cpu")
    )
    text = np.arange(3, 23, dtype=np.int32)
    types = torch.tensor([[0] * 8 + [1] * 12])
    with torch.inference_mode():
        expected = reference(torch.tensor([text.tolist()]), token_type_ids=types).logits[0]
    torch.testing.assert_close(encoder(text, 8), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(encoder(text), expected, atol=1e-3)


def test_a_device_that_fails_ends_the_worker(tmp_path: Path, monkeypatch: Any) -> None:
    """Otherwise each later text would fail, too."""
    _write(tmp_path, "SqueezeBertModel")
    options = ModelOptions(model=str(tmp_path), skip_tokenizer_init=True)
    model = resolve_model(options, Console()).config
    found = read_foreign_encoder(model)
    assert found is not None
    config = EngineConfig("/run", 1, model, CacheConfig(), SchedulerConfig())
    encoder = TextEncoder(config, HostDevice(), *found)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(transformers.SqueezeBertModel, "forward", fail)
    pooling = PoolingParams(PoolingKind.MEAN, computes_whole_prompt=True)
    tokens = int32_bytes([3, 4, 5])
    none = SamplingParams()
    request = NewRequestData(0, (0, 0), tokens, 3, 0, (), none, (), pooling_params=pooling)
    with pytest.raises(EngineError, match="the GPU failed in a text of 3 tokens: CUDA error"):
        encoder.result(request)
