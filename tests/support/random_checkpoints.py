"""Checkpoints of random weights for any `ModelSpec`."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from engine.workers.layers.spec import ModelSpec
from engine.workers.loaders.checkpoint import Checkpoint
from engine.workers.loaders.open_checkpoint import open_checkpoint
from safetensors.torch import save_file


def random_checkpoint(
    path: Path,
    spec: ModelSpec,
    seed: int = 0,
    edit: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
) -> Checkpoint:
    """Write a checkpoint in which no norm and no bias is without effect, after `edit`, and open it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15 + mean

    hidden, inner = spec.hidden_size, spec.intermediate_size
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm_mean = 0.8 - spec.norm_weight_offset
    tensors = {
        "embed_tokens.weight": random(spec.vocab_size, hidden),
        "norm.weight": random(hidden, mean=norm_mean),
    }
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = random(spec.vocab_size, hidden)
    if spec.fused_projections:
        qkv = {"qkv_proj": query_size + 2 * kv_size}
        gate_up = {"gate_up_proj": 2 * inner}
    else:
        qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": inner, "up_proj": inner}
    norms = spec.norms
    for i in range(len(spec.layers)):
        prefix = f"layers.{i}."
        names = (
            norms.attention_input,
            norms.attention_output,
            norms.mlp_input,
            norms.mlp_output,
        )
        for name in filter(None, names):
            tensors[f"{prefix}{name}.weight"] = random(hidden, mean=norm_mean)
        if spec.qk_norm:
            is_head = spec.qk_norm == "head"
            for name, size in (("q_norm", query_size), ("k_norm", kv_size)):
                tensors[f"{prefix}self_attn.{name}.weight"] = random(
                    spec.head_dim if is_head else size, mean=norm_mean
                )
        projections = [
            *((f"self_attn.{name}", rows, hidden, spec.qkv_bias) for name, rows in qkv.items()),
            ("self_attn.o_proj", hidden, query_size, spec.attention_output_bias),
            *((f"mlp.{name}", rows, hidden, spec.mlp_bias) for name, rows in gate_up.items()),
            ("mlp.down_proj", hidden, inner, spec.mlp_bias),
        ]
        for name, rows, columns, has_bias in projections:
            tensors[f"{prefix}{name}.weight"] = random(rows, columns)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = random(rows)
    edit(tensors)
    (path / "config.json").write_text(json.dumps({"model_type": spec.model_type}))
    save_file(
        {name if name == "lm_head.weight" else f"model.{name}": t for name, t in tensors.items()},
        path / "model.safetensors",
    )
    return open_checkpoint(path)
