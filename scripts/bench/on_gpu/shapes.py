"""Models without weights: their configs, and the bytes and operations of their steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_GROUP_SIZE = 128
_PACKED_BYTES = 0.5 + 2 / _GROUP_SIZE
"""Bytes of an element of a quantized matrix, with its part of a scale."""


def packed_integers(group_size: int) -> dict[str, Any]:
    """Return the config entry of matrices of 4-bit integers with a scale for each `group_size` columns."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": True,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Shape:
    """A Llama or Qwen3 decoder in bfloat16. If `is_quantized`, the matrices of its layers have 4 bits.

    With experts, `intermediate_size` is that of each expert.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    is_quantized: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0

    def write(self, directory: Path, max_model_len: int) -> Path:
        """Write a directory for `engine serve --load-format dummy`, with a tokenizer."""
        architecture = _ARCHITECTURES[self.model_type]
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": 1,
        }
        if self.num_experts:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_token,
                "moe_intermediate_size": self.intermediate_size,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.is_quantized:
            config["quantization_config"] = packed_integers(_GROUP_SIZE)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        # Text is tokenized into single bytes. The other tokens are words, so every generated token has text.
        tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens += (f"<{i}>" for i in range(len(tokens), self.vocab_size))
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the names of a dense model's weights, without `.weight`, and their shapes."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, mlp = self.hidden_size, self.intermediate_size
        yield "model.embed_tokens", (self.vocab_size, hidden)
        yield "model.norm", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head", (self.vocab_size, hidden)
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            yield layer + "input_layernorm", (hidden,)
            yield layer + "post_attention_layernorm", (hidden,)
            if self.model_type == "qwen3":
                yield layer + "self_attn.q_norm", (self.head_dim,)
                yield layer + "self_attn.k_norm", (self.head_dim,)
            yield layer + "self_attn.q_proj", (queries, hidden)
            yield layer + "self_attn.k_proj", (keys, hidden)
            yield layer + "self_attn.v_proj", (keys, hidden)
            yield layer + "self_attn.o_proj", (hidden, queries)
            yield layer + "mlp.gate_proj", (mlp, hidden)
            yield layer + "mlp.up_proj", (mlp, hidden)
            yield layer + "mlp.down_proj", (hidden, mlp)

    def stored_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Return the names of a checkpoint's tensors, their types in safetensors, and their shapes."""
        for name, size in self.tensors():
            if self.is_quantized and name.endswith("_proj"):
                rows, columns = size
                yield f"{name}.weight_packed", "I32", (rows, columns // 8)
                yield f"{name}.weight_scale", "BF16", (rows, columns // _GROUP_SIZE)
            else:
                yield f"{name}.weight", "BF16", size

    @property
    def attention_weights(self) -> int:
        """Return the number of elements of one layer's attention matrices."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * heads * self.head_dim

    @property
    def mlp_weights(self) -> int:
        """Return the number of elements of the matrices of one layer's MLP, or of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_weights(self) -> int:
        """Return the number of elements of one layer's matrices."""
        return self.attention_weights + (self.num_experts or 1) * self.mlp_weights

    def read_weights(self, batch: int) -> float:
        """Return the number of elements that a step of `batch` tokens reads in each layer.

        With experts, this is the expected number if each token chooses experts independently and uniformly.
        """
        if not self.num_experts:
            return self.layer_weights
        share = 1 - (1 - self.num_experts_per_token / self.num_experts) ** batch
        experts = share * self.num_experts
        return self.attention_weights + experts * self.mlp_weights

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_token_bytes(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes that a decode step of `batch` requests reads: every matrix once, and all keys and values."""
        element = _PACKED_BYTES if self.is_quantized else 2
        weights = round(element * self.num_layers * self.read_weights(batch))
        return weights + 2 * self.head_weights + batch * context * self.kv_token_bytes

    def prefill_flops(self, num_tokens: int) -> int:
        """Return the operations of a prompt: its matrices, two attention products with half of the scores, the head."""
        attention = 2 * num_tokens**2 * self.num_heads * self.head_dim
        mlp = (self.num_experts_per_token or 1) * self.mlp_weights
        layer = 2 * num_tokens * (self.attention_weights + mlp) + attention
        return self.num_layers * layer + 2 * self.head_weights


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_LLAMA = Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, False)
SHAPES = {
    "Llama-3.1-8B": _LLAMA,
    "Llama-3.1-8B in 4 bits": replace(_LLAMA, is_quantized=True),
    "Qwen3-30B-A3B": Shape(
        "qwen3_moe",
        151936,
        2048,
        768,
        48,
        32,
        4,
        128,
        False,
        num_experts=128,
        num_experts_per_token=8,
    ),
    "Qwen3-0.6B": Shape("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
}
_TINY = Shape("qwen3", 2048, 128, 128, 2, 4, 2, 32, True)
TINY_SHAPES = {
    "tiny": _TINY,
    "tiny in 4 bits": replace(_TINY, is_quantized=True),
    "tiny with experts": replace(
        _TINY, model_type="qwen3_moe", num_experts=8, num_experts_per_token=2
    ),
}
