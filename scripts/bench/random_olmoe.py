"""Write a mixture of experts of OLMoE-1B-7B's shape with random Q4_K weights, for Engine and llama.cpp alike.

    scripts/bench/run random_olmoe OUT.gguf [--layers 16]

The vocabulary is the default model's, filled up with unused tokens to OLMoE's 50,304; the embedding and the head are
Q6_K, as llama.cpp's Q4_K mixtures have them. By default it has half of OLMoE's 16 layers, to fit in little memory. The
text it writes is noise; its speed is not. Random routers spread tokens over all experts, as trained ones do.
Needs the `test` extra (the gguf package).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from side_by_side.contenders import default_model
from side_by_side.random_gguf import RandomTensors, add_tokenizer, write_gguf

HIDDEN_SIZE, INTERMEDIATE_SIZE = 2048, 1024
NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN = 64, 8
NUM_HEADS = 16
VOCAB_SIZE, CONTEXT_LENGTH = 50_304, 4096


def add_hyperparameters(writer: GGUFWriter, num_layers: int) -> None:
    writer.add_type("model")
    writer.add_name("random OLMoE")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(NUM_EXPERTS_PER_TOKEN)
    writer.add_block_count(num_layers)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)


def add_weights(tensors: RandomTensors, num_layers: int) -> None:
    for name in ("token_embd", "output"):
        tensors.vocabulary(name, VOCAB_SIZE, HIDDEN_SIZE)
    tensors.norm("output_norm", HIDDEN_SIZE)
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            tensors.norm(prefix + name, HIDDEN_SIZE)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.matrix(prefix + name, HIDDEN_SIZE, HIDDEN_SIZE)
        tensors.floats(f"{prefix}ffn_gate_inp.weight", NUM_EXPERTS, HIDDEN_SIZE)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            tensors.matrix(prefix + name, NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE)
        tensors.matrix(f"{prefix}ffn_down_exps", NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    writer = GGUFWriter(arguments.out, "olmoe")
    add_hyperparameters(writer, arguments.layers)
    add_tokenizer(writer, default_model(), VOCAB_SIZE)
    tensors = RandomTensors(writer, np.random.default_rng(arguments.seed))
    add_weights(tensors, arguments.layers)
    write_gguf(writer)


if __name__ == "__main__":
    main()
