"""The sizes of a model that determine how it can be divided among workers."""

from __future__ import annotations

from typing import Final

import msgspec

from ..config import ParallelConfig
from ..errors import ConfigError, counted

DEFAULTS_OF_GEMMA3: Final = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
"""Defaults in transformers for the fields that a Gemma 3 config may omit."""


class ModelDimensions(msgspec.Struct, frozen=True):
    """Sizes of a model. None means that the config does not say, so that the model's family determines the size.

    `num_recurrent_units` is the number of parts into which a recurrent layer can be divided; 0 without such layers.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    num_recurrent_units: int = 0


EXPERT_COUNTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "moe_num_primary_experts",
)
"""The names that families use for the number of a layer's experts."""


def check_parallel(model: ModelDimensions, parallel: ParallelConfig) -> None:
    """Check that the model can be divided as configured.

    Raises:
        ConfigError: It cannot; the message has the sizes and the values that are possible.
    """
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if stages > model.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {stages}: the model has only {counted(model.num_layers, 'layer')}, and every stage "
            f"needs at least one; use at most {model.num_layers}"
        )
    num_workers = ranks * parallel.data_parallel_size
    if parallel.enable_expert_parallel and model.num_experts < num_workers:
        raise ConfigError(
            f"--enable-expert-parallel: {num_workers} workers cannot divide the {model.num_experts} experts of a layer; "
            "remove the option"
            if model.num_experts
            else "--enable-expert-parallel: the model has no experts; remove the option"
        )
    flag = f"--tensor-parallel-size {ranks}"
    for count, what in (
        (model.num_heads, "attention heads"),
        (model.intermediate_size, "elements of the MLP (intermediate_size)"),
        (model.num_recurrent_units, "heads or groups of a recurrent layer"),
    ):
        if count % ranks:
            raise ConfigError(
                f"{flag}: the model's {count} {what} cannot be divided equally; use {_sizes(model)}"
            )
    kv_heads = model.num_kv_heads
    if kv_heads is not None and kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"{flag}: the model's {kv_heads} key/value heads can be neither divided nor replicated equally; "
            f"use {_sizes(model)}"
        )
    if ranks > model.vocab_size:
        raise ConfigError(f"{flag}: the model has a vocabulary of only {model.vocab_size} tokens")


def _sizes(model: ModelDimensions) -> str:
    """Return text that lists the tensor-parallel sizes that the model allows."""
    kv_heads = model.num_kv_heads or model.num_heads
    sizes = [
        str(size)
        for size in range(1, model.num_heads + 1)
        if model.num_heads % size == 0
        and model.intermediate_size % size == 0
        and model.num_recurrent_units % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    return " or ".join((", ".join(sizes[:-1]), sizes[-1])) if len(sizes) > 1 else sizes[0]
