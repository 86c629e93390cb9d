"""Write a GGUF file in the shape of a published model, with random weights, for Engine and llama.cpp alike.

    scripts/bench/run random_model SHAPE OUT.gguf [--layers N]

SHAPE is one of `qwen2` (Qwen2.5-1.5B), `olmoe` (OLMoE-1B-7B, a mixture of experts), `lfm2` (LFM2-1.2B, short
convolutions), `granite` (Granite 4 Tiny, Mamba-2 and experts) and `gpt-oss` (gpt-oss-20b, experts in MXFP4). Mixtures
of experts have fewer layers than the published models by default, to fit in little memory. The vocabulary is the
default model's, filled up with unused tokens. The text that the model writes is noise; its speed is not. Random routers
spread tokens over all experts, as trained ones do. Needs the `test` extra (the gguf package).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from side_by_side.random_gguf import RandomTensors, add_tokenizer, write_gguf
from support.servers.server import default_model


@dataclass(frozen=True)
class Shape:
    """A published model: the functions that write its hyperparameters and its tensors.

    Attributes:
        architecture: Its name in GGUF files.
        num_layers: The number of layers that are written by default.
        vocab_size: The size of the published model's vocabulary.
        add_hyperparameters: Adds the hyperparameters of a file with the given number of layers.
        add_weights: Adds the tensors of that many layers.
    """

    architecture: str
    num_layers: int
    vocab_size: int
    add_hyperparameters: Callable[[GGUFWriter, int], None]
    add_weights: Callable[[RandomTensors, int], None]


def add_sizes(
    writer: GGUFWriter, num_layers: int, hidden_size: int, intermediate_size: int, eps: float
) -> None:
    """Add the hyperparameters that all architectures have."""
    writer.add_type("model")
    writer.add_name(f"random {writer.arch}")
    writer.add_context_length(32_768)
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_block_count(num_layers)
    writer.add_layer_norm_rms_eps(eps)


def qwen2_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    add_sizes(writer, num_layers, 1536, 8960, 1e-6)
    writer.add_head_count(12)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)


def qwen2_weights(tensors: RandomTensors, num_layers: int) -> None:
    tensors.vocabulary("token_embd", QWEN2.vocab_size, 1536)
    tensors.norm("output_norm", 1536)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            tensors.norm(prefix + name, 1536)
        for name, size in (("attn_q", 1536), ("attn_k", 256), ("attn_v", 256)):
            tensors.matrix(prefix + name, size, 1536)
            tensors.floats(f"{prefix}{name}.bias", size)
        tensors.matrix(f"{prefix}attn_output", 1536, 1536)
        for name in ("ffn_gate", "ffn_up"):
            tensors.matrix(prefix + name, 8960, 1536)
        tensors.matrix(f"{prefix}ffn_down", 1536, 8960)


def olmoe_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    add_sizes(writer, num_layers, 2048, 1024, 1e-5)
    writer.add_head_count(16)
    writer.add_head_count_kv(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(64)
    writer.add_expert_used_count(8)


def olmoe_weights(tensors: RandomTensors, num_layers: int) -> None:
    for name in ("token_embd", "output"):
        tensors.vocabulary(name, OLMOE.vocab_size, 2048)
    tensors.norm("output_norm", 2048)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            tensors.norm(prefix + name, 2048)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.matrix(prefix + name, 2048, 2048)
        tensors.floats(f"{prefix}ffn_gate_inp.weight", 64, 2048)
        add_experts(tensors, prefix, 64, 2048, 1024)


def add_experts(
    tensors: RandomTensors, prefix: str, num_experts: int, hidden_size: int, size: int
) -> None:
    """Add the matrices of a layer's experts."""
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        tensors.matrix(prefix + name, num_experts, size, hidden_size)
    tensors.matrix(f"{prefix}ffn_down_exps", num_experts, hidden_size, size)


LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)


def lfm2_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    add_sizes(writer, num_layers, 2048, 8192, 1e-5)
    writer.add_head_count(32)
    writer.add_head_count_kv([8 if i in LFM2_ATTENTION else 0 for i in range(num_layers)])
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(3)


def lfm2_weights(tensors: RandomTensors, num_layers: int) -> None:
    tensors.vocabulary("token_embd", LFM2.vocab_size, 2048)
    tensors.norm("token_embd_norm", 2048)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            tensors.norm(prefix + name, 2048)
        if layer in LFM2_ATTENTION:
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors.norm(prefix + name, 64)
            for name, size in (("attn_q", 2048), ("attn_k", 512), ("attn_v", 512)):
                tensors.matrix(prefix + name, size, 2048)
            tensors.matrix(f"{prefix}attn_output", 2048, 2048)
        else:
            tensors.floats(f"{prefix}shortconv.conv.weight", 2048, 3)
            tensors.matrix(f"{prefix}shortconv.in_proj", 3 * 2048, 2048)
            tensors.matrix(f"{prefix}shortconv.out_proj", 2048, 2048)
        for name in ("ffn_gate", "ffn_up"):
            tensors.matrix(prefix + name, 8192, 2048)
        tensors.matrix(f"{prefix}ffn_down", 2048, 8192)


GRANITE_ATTENTION = (5, 15, 25, 35)
MAMBA_HEADS, MAMBA_STATE = 48, 128
MAMBA_SIZE = MAMBA_HEADS * 64
MAMBA_CONV_SIZE = MAMBA_SIZE + 2 * MAMBA_STATE


def granite_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    add_sizes(writer, num_layers, 1536, 512, 1e-5)
    writer.add_head_count(12)
    writer.add_head_count_kv([4 if i in GRANITE_ATTENTION else 0 for i in range(num_layers)])
    writer.add_attention_scale(1 / 128)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(6.0)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_scaling_finetuned(False)
    writer.add_expert_count(64)
    writer.add_expert_used_count(6)
    writer.add_expert_shared_feed_forward_length(1024)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(MAMBA_STATE)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(MAMBA_SIZE)
    writer.add_ssm_time_step_rank(MAMBA_HEADS)


def granite_weights(tensors: RandomTensors, num_layers: int) -> None:
    tensors.vocabulary("token_embd", GRANITE.vocab_size, 1536)
    tensors.norm("output_norm", 1536)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            tensors.norm(prefix + name, 1536)
        if layer in GRANITE_ATTENTION:
            for name, size in (("attn_q", 1536), ("attn_k", 512), ("attn_v", 512)):
                tensors.matrix(prefix + name, size, 1536)
            tensors.matrix(f"{prefix}attn_output", 1536, 1536)
        else:
            in_size = MAMBA_SIZE + MAMBA_CONV_SIZE + MAMBA_HEADS
            tensors.matrix(f"{prefix}ssm_in", in_size, 1536)
            tensors.floats(f"{prefix}ssm_conv1d.weight", MAMBA_CONV_SIZE, 4)
            tensors.floats(f"{prefix}ssm_conv1d.bias", MAMBA_CONV_SIZE)
            tensors.floats(f"{prefix}ssm_dt.bias", MAMBA_HEADS)
            # The logarithms of decay rates from 1 to the number of heads, as in an untrained model.
            rates = -np.arange(1, MAMBA_HEADS + 1, dtype=np.float32)
            tensors.writer.add_tensor(f"{prefix}ssm_a", rates[:, None])
            tensors.writer.add_tensor(f"{prefix}ssm_d", np.ones((MAMBA_HEADS, 1), np.float32))
            tensors.writer.add_tensor(
                f"{prefix}ssm_norm.weight", np.ones((1, MAMBA_SIZE), np.float32)
            )
            tensors.matrix(f"{prefix}ssm_out", 1536, MAMBA_SIZE)
        tensors.floats(f"{prefix}ffn_gate_inp.weight", 64, 1536)
        add_experts(tensors, prefix, 64, 1536, 512)
        for name in ("ffn_gate_shexp", "ffn_up_shexp"):
            tensors.matrix(prefix + name, 1024, 1536)
        tensors.matrix(f"{prefix}ffn_down_shexp", 1536, 1024)


def gpt_oss_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    add_sizes(writer, num_layers, 2880, 2880, 1e-5)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_freq_base(150_000.0)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_sliding_window(128)
    writer.add_expert_count(32)
    writer.add_expert_used_count(4)
    writer.add_expert_feed_forward_length(2880)


def gpt_oss_weights(tensors: RandomTensors, num_layers: int) -> None:
    for name in ("token_embd", "output"):
        tensors.bytes(name, GPT_OSS.vocab_size, 2880)
    tensors.norm("output_norm", 2880)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            tensors.norm(prefix + name, 2880)
        for name, size in (("attn_q", 4096), ("attn_k", 512), ("attn_v", 512)):
            tensors.bytes(prefix + name, size, 2880)
            tensors.floats(f"{prefix}{name}.bias", size)
        tensors.bytes(f"{prefix}attn_output", 2880, 4096)
        tensors.floats(f"{prefix}attn_output.bias", 2880)
        tensors.floats(f"{prefix}attn_sinks.weight", 64)
        tensors.floats(f"{prefix}ffn_gate_inp.weight", 32, 2880)
        tensors.floats(f"{prefix}ffn_gate_inp.bias", 32)
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            tensors.mxfp4(prefix + name, 32, 2880, 2880)
            tensors.floats(f"{prefix}{name}.bias", 32, 2880)


QWEN2 = Shape("qwen2", 28, 151_936, qwen2_hyperparameters, qwen2_weights)
OLMOE = Shape("olmoe", 8, 50_304, olmoe_hyperparameters, olmoe_weights)
LFM2 = Shape("lfm2", 16, 65_536, lfm2_hyperparameters, lfm2_weights)
GRANITE = Shape("granitehybrid", 12, 100_352, granite_hyperparameters, granite_weights)
GPT_OSS = Shape("gpt-oss", 4, 201_088, gpt_oss_hyperparameters, gpt_oss_weights)

SHAPES = {"qwen2": QWEN2, "olmoe": OLMOE, "lfm2": LFM2, "granite": GRANITE, "gpt-oss": GPT_OSS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--layers", type=int, help="number of layers (default: all, or as many as fit into 3 GB)"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    num_layers = arguments.layers or shape.num_layers
    writer = GGUFWriter(arguments.out, shape.architecture)
    shape.add_hyperparameters(writer, num_layers)
    add_tokenizer(writer, default_model(), shape.vocab_size)
    shape.add_weights(RandomTensors(writer, np.random.default_rng(arguments.seed)), num_layers)
    write_gguf(writer)


if __name__ == "__main__":
    main()
