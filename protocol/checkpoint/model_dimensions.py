"""The sizes of a model that decide among how many workers it can be divided."""

from __future__ import annotations

from typing import Final

import msgspec

from ..config import ParallelConfig
from ..errors import ConfigError

UNSAID_BY_GEMMA3: Final = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
"""What transformers takes for granted where a Gemma 3's config does not say it."""


class ModelDimensions(msgspec.Struct, frozen=True):
    """None is a size that the configuration leaves to the model's family."""

    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    intermediate_size: int
    vocab_size: int


def check_parallel(model: ModelDimensions, parallel: ParallelConfig) -> None:
    """Raise ConfigError, with the numbers, if the model cannot be divided so."""
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if stages > model.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has only {model.num_layers} layers, and every stage "
            f"needs one; use {model.num_layers} or less"
        )
    flag = f"--tensor-parallel-size {ranks}"
    for count, what in (
        (model.num_heads, "attention heads"),
        (model.intermediate_size, "elements of the MLP (intermediate_size)"),
    ):
        if count % ranks:
            raise ConfigError(
                f"{flag}: the model's {count} {what} cannot be shared equally; use {_sizes(model)}"
            )
    kv_heads = model.num_kv_heads
    if kv_heads is not None and kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"{flag}: the model's {kv_heads} key/value heads can neither be shared equally nor copied equally "
            f"often; use {_sizes(model)}"
        )
    if ranks > model.vocab_size:
        raise ConfigError(f"{flag}: the model has a vocabulary of only {model.vocab_size} tokens")


def _sizes(model: ModelDimensions) -> str:
    """The tensor-parallel sizes that the model allows."""
    kv_heads = model.num_kv_heads or model.num_heads
    sizes = [
        str(size)
        for size in range(1, model.num_heads + 1)
        if model.num_heads % size == 0
        and model.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    return " or ".join((", ".join(sizes[:-1]), sizes[-1])) if len(sizes) > 1 else sizes[0]
