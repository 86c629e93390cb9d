"""Any division of a model among workers gives the tokens that one worker gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine.protocol.config import ParallelConfig
from engine.protocol.gguf import GGMLQuantizationType
from support.gguf_writer import write_gguf
from support.replica import RankResult, Served, run_replica
from support.tiny_checkpoints import random_model, sentencepiece_tokenizer

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
MODELS = {
    # A head for each query head, a head for every two of them, and one that every rank needs a copy of.
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 12}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"num_key_value_heads": 12, "query_pre_attn_scalar": 8, "sliding_window": 16},
    ),
}
PRODUCTS = [(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family as safetensors and as GGUF, quantised where the rows are whole blocks."""
    tokenizer = sentencepiece_tokenizer()
    paths = {}
    for name, (config, model_class, heads) in MODELS.items():
        directory = tmp_path_factory.mktemp(name)
        model = random_model(config, model_class, SIZES | heads, tokenizer)
        model.save_pretrained(directory)
        paths[name] = directory
        paths[f"{name}.gguf"] = write_gguf(
            directory / "model.gguf", model, tokenizer, ggml_type=GGMLQuantizationType.Q8_0
        )
    return paths


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path], tmp_path_factory) -> dict[str, RankResult]:
    served = [Served(path) for path in checkpoints.values()]
    (results,) = run_replica(tmp_path_factory.mktemp("alone"), ParallelConfig(), served)
    return dict(zip(checkpoints, results, strict=True))


@pytest.mark.parametrize(("tensor", "stages"), PRODUCTS)
def test_tokens_are_those_of_one_worker(
    tmp_path: Path, checkpoints: dict[str, Path], alone: dict[str, RankResult], tensor, stages
) -> None:
    parallel = ParallelConfig(tensor, stages)
    ranks = run_replica(tmp_path, parallel, [Served(path) for path in checkpoints.values()])
    for i, (name, expected) in enumerate(alone.items()):
        results = [rank[i] for rank in ranks]
        output = results[parallel.output_rank]
        assert output.tokens == expected.tokens, name
        assert np.allclose(output.logprobs, expected.logprobs, atol=1e-4), name
        assert sum(map(len, output.tokens)) > 80
        # The last stage's ranks agree, the others have nothing to say.
        assert all(r.tokens == output.tokens for r in results[parallel.output_rank :])
        assert not any(any(r.tokens) for r in results[: parallel.output_rank])
