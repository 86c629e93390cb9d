"""The minimum cost of a model's tokens for any engine: bytes to read and operations to perform."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from engine.protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType
from engine.workers.loaders.checkpoint import Checkpoint
from engine.workers.loaders.gguf import GGUFCheckpoint
from engine.workers.loaders.open_checkpoint import open_checkpoint

KV_ELEMENT_BYTES = 2
BITS_OF_BF16 = 12
"""Bits that a product reads per weight, as `workers/cpu/csrc/linear/bf16_block.h` stores it."""


@dataclass(frozen=True)
class ModelCost:
    """Memory traffic and arithmetic of one model. In a mixture of experts, only the chosen experts count.

    Attributes:
        weight_bytes: Bytes of the matrices that a step of one token reads.
        layer_ops: Operations of the products of one token in all layers.
        head_ops: Operations of the head for one token.
        kv_token_bytes: Bytes of KV cache per token.
        attention_ops_per_key: Operations of attention for one token and one key to which it attends.
    """

    weight_bytes: int
    layer_ops: int
    head_ops: int
    kv_token_bytes: int
    attention_ops_per_key: int

    @classmethod
    def of(cls, path: Path) -> ModelCost:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        embedding = "model.embed_tokens.weight"
        head = "lm_head.weight" if "lm_head.weight" in checkpoint.names() else embedding
        matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
        layers = [name for name in matrices if name not in (embedding, head)]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 1

        def used(name: str, amount: int) -> int:
            if ".experts." not in name:
                return amount
            return int(amount * config["num_experts_per_tok"] // num_experts)

        # Layers with a recurrent state have no keys.
        kinds = config.get("layer_types") or ["attention"] * config["num_hidden_layers"]
        num_attending = sum("attention" in kind and "linear" not in kind for kind in kinds)
        kv_size = config["num_key_value_heads"] * head_dim * num_attending
        query_size = config["num_attention_heads"] * head_dim * num_attending
        return cls(
            weight_bytes=sum(used(name, _read_bytes(checkpoint, name)) for name in [*layers, head]),
            layer_ops=2 * sum(used(name, _elements(checkpoint, name)) for name in layers),
            head_ops=2 * _elements(checkpoint, head),
            kv_token_bytes=2 * kv_size * KV_ELEMENT_BYTES,
            attention_ops_per_key=4 * query_size,
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def _elements(checkpoint: Checkpoint, name: str) -> int:
    rows, columns = checkpoint.shape(name)
    return rows * columns


def _read_bytes(checkpoint: Checkpoint, name: str) -> int:
    elements = _elements(checkpoint, name)
    if isinstance(checkpoint, GGUFCheckpoint):
        stored_type = checkpoint.ggml_type(name)
        if stored_type != GGMLQuantizationType.BF16:
            block_elements, block_bytes = BLOCK_SIZES[stored_type]
            return elements // block_elements * block_bytes
    return elements * BITS_OF_BF16 // 8
