"""Checkpoints with random weights for any `ModelSpec`."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from engine.workers.layers.spec import ModelSpec
from engine.workers.layers.specs.experts import ExpertsSpec
from engine.workers.loaders.checkpoint import Checkpoint
from engine.workers.loaders.open_checkpoint import open_checkpoint
from safetensors.torch import save_file


def random_checkpoint(
    path: Path,
    spec: ModelSpec,
    edit: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    fused: bool = False,
) -> Checkpoint:
    """Write a checkpoint in which every norm and bias has an effect, after `edit`, and open it."""
    generator = torch.Generator().manual_seed(0)

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
    if fused:
        qkv = {"qkv_proj": query_size + 2 * kv_size}
    else:
        qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}

    def attention() -> list[tuple[str, int, int, bool]]:
        latent = spec.latent
        if latent is None:
            return [
                *((f"self_attn.{name}", rows, hidden, spec.qkv_bias) for name, rows in qkv.items()),
                ("self_attn.o_proj", hidden, query_size, spec.attention_output_bias),
            ]
        rank, query_rank = latent.kv_rank, latent.query_rank
        query_rows = spec.num_heads * (latent.plain_dim + latent.rotary_dim)
        expanded = spec.num_heads * (latent.plain_dim + latent.value_dim)
        queries = [("self_attn.q_proj", query_rows, hidden, spec.qkv_bias)]
        if query_rank is not None:
            queries = [
                ("self_attn.q_a_proj", query_rank, hidden, spec.qkv_bias),
                ("self_attn.q_b_proj", query_rows, query_rank, False),
            ]
        return [
            *queries,
            ("self_attn.kv_a_proj_with_mqa", rank + latent.rotary_dim, hidden, spec.qkv_bias),
            ("self_attn.kv_b_proj", expanded, rank, False),
            (
                "self_attn.o_proj",
                hidden,
                spec.num_heads * latent.value_dim,
                spec.attention_output_bias,
            ),
        ]

    def mlp(prefix: str, inner: int, has_biases: bool) -> list[tuple[str, int, int, bool]]:
        gate_up = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
        if not spec.has_gate:
            gate_up = {"up_proj": inner}
        return [
            *((f"{prefix}{name}", rows, hidden, has_biases) for name, rows in gate_up.items()),
            (f"{prefix}down_proj", hidden, inner, has_biases),
        ]

    def mixture(experts: ExpertsSpec) -> list[tuple[str, int, int, bool]]:
        matrices = [("mlp.gate", experts.num_experts, hidden, experts.has_router_bias)]
        for expert in range(experts.num_experts):
            prefix = f"mlp.experts.{expert}."
            matrices += mlp(prefix, experts.intermediate_size, experts.has_biases)
        if experts.shared_intermediate_size:
            shared_size = experts.shared_intermediate_size
            matrices += mlp("mlp.shared_experts.", shared_size, spec.mlp_bias)
        if experts.has_shared_gate:
            matrices.append(("mlp.shared_expert_gate", 1, hidden, False))
        return matrices

    norms = spec.norms
    for i, layer in enumerate(spec.layers):
        prefix = f"layers.{i}."
        names = (
            norms.attention_input,
            norms.attention_output,
            norms.mlp_input,
            norms.mlp_output,
        )
        for name in filter(None, names):
            tensors[f"{prefix}{name}.weight"] = random(hidden, mean=norm_mean)
        if spec.has_sinks:
            tensors[f"{prefix}self_attn.sinks"] = random(spec.num_heads, mean=1.0)
        if spec.qk_norm:
            is_head = spec.qk_norm == "head"
            for name, size in (("q_norm", query_size), ("k_norm", kv_size)):
                tensors[f"{prefix}self_attn.{name}.weight"] = random(
                    spec.head_dim if is_head else size, mean=norm_mean
                )
        if spec.latent is not None:
            ranks = {"kv_a": spec.latent.kv_rank, "q_a": spec.latent.query_rank}
            for name, rank in ranks.items():
                if rank is not None:
                    tensors[f"{prefix}self_attn.{name}_layernorm.weight"] = random(rank, mean=0.8)
        projections = [
            *attention(),
            *(mixture(layer.experts) if layer.experts else mlp("mlp.", inner, spec.mlp_bias)),
        ]
        for name, rows, columns, has_bias in projections:
            tensors[f"{prefix}{name}.weight"] = random(rows, columns)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = random(rows)
        if layer.experts and layer.experts.has_correction_bias:
            name = f"{prefix}mlp.gate.e_score_correction_bias"
            tensors[name] = random(layer.experts.num_experts)
    edit(tensors)
    (path / "config.json").write_text(json.dumps({"model_type": spec.model_type}))
    save_file(
        {name if name == "lm_head.weight" else f"model.{name}": t for name, t in tensors.items()},
        path / "model.safetensors",
    )
    return open_checkpoint(path)
