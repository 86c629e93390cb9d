"""Write a model of Qwen2.5-1.5B's shape with random Q4_K weights, for Engine and llama.cpp alike.

    scripts/bench/run random_qwen2 OUT.gguf

The vocabulary is the default model's, filled up with unused tokens to Qwen's 151,936; the embedding, which is
also the head, is Q6_K, as llama.cpp's Q4_K mixtures have it. The text it writes is noise; its speed is not.
Needs the `test` extra (the gguf package).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from side_by_side.contenders import default_model
from side_by_side.random_gguf import RandomTensors, add_tokenizer, write_gguf

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 1536, 8960, 28
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 128
VOCAB_SIZE, CONTEXT_LENGTH = 151_936, 32_768


def add_hyperparameters(writer: GGUFWriter) -> None:
    writer.add_type("model")
    writer.add_name("random Qwen2 1.5B")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_block_count(NUM_LAYERS)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)


def add_weights(tensors: RandomTensors) -> None:
    tensors.vocabulary("token_embd", VOCAB_SIZE, HIDDEN_SIZE)
    tensors.norm("output_norm", HIDDEN_SIZE)
    query_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for layer in range(NUM_LAYERS):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            tensors.norm(prefix + name, HIDDEN_SIZE)
        for name, size in (("attn_q", query_size), ("attn_k", kv_size), ("attn_v", kv_size)):
            tensors.matrix(prefix + name, size, HIDDEN_SIZE)
            tensors.floats(f"{prefix}{name}.bias", size)
        tensors.matrix(f"{prefix}attn_output", HIDDEN_SIZE, query_size)
        for name in ("ffn_gate", "ffn_up"):
            tensors.matrix(prefix + name, INTERMEDIATE_SIZE, HIDDEN_SIZE)
        tensors.matrix(f"{prefix}ffn_down", HIDDEN_SIZE, INTERMEDIATE_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    writer = GGUFWriter(arguments.out, "qwen2")
    add_hyperparameters(writer)
    add_tokenizer(writer, default_model(), VOCAB_SIZE)
    add_weights(RandomTensors(writer, np.random.default_rng(arguments.seed)))
    write_gguf(writer)


if __name__ == "__main__":
    main()
