"""Write a model of Qwen2.5-1.5B's shape with random Q4_K weights, for Engine and llama.cpp alike.

    scripts/bench/run random_qwen2 OUT.gguf

The vocabulary is the default model's, filled up with unused tokens to Qwen's 151,936; the embedding, which is
also the head, is Q6_K, as llama.cpp's Q4_K mixtures have it. The text it writes is noise; its speed is not.
Needs the `test` extra (the gguf package).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from numpy.typing import NDArray
from side_by_side.contenders import default_model

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 1536, 8960, 28
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 128
VOCAB_SIZE, CONTEXT_LENGTH = 151_936, 32_768
BLOCK_ELEMENTS = 256
WEIGHT_STD = 0.02


def q4_k(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random blocks: float16 scale and minimum, 12 bytes of 6-bit scales and minima, 128 of 4-bit values."""
    blocks = rng.integers(0, 256, (rows * columns // BLOCK_ELEMENTS, 144), np.uint8)
    scale = WEIGHT_STD / 257  # the standard deviation of scale * value - 7.5 * minimum
    blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def q6_k(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random blocks: 192 bytes of 6-bit values, 16 int8 scales, a float16 scale."""
    blocks = rng.integers(0, 256, (rows * columns // BLOCK_ELEMENTS, 210), np.uint8)
    scale = WEIGHT_STD / 1365  # the standard deviation of an int8 times a 6-bit integer
    blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


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


def add_tokenizer(writer: GGUFWriter, source: str) -> None:
    fields = GGUFReader(source).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")
    num_unused = VOCAB_SIZE - len(tokens)
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list(tokens + [f"[unused{i}]" for i in range(num_unused)])
    writer.add_token_types(value("token_type") + [int(TokenType.UNUSED)] * num_unused)
    writer.add_token_merges(value("merges"))
    writer.add_bos_token_id(value("bos_token_id"))
    writer.add_eos_token_id(value("eos_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())


def add_weights(writer: GGUFWriter, rng: np.random.Generator) -> None:
    def matrix(name: str, rows: int, columns: int) -> None:
        kind = GGMLQuantizationType.Q4_K
        writer.add_tensor(f"{name}.weight", q4_k(rng, rows, columns), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN_SIZE, np.float32))

    embedding = q6_k(rng, VOCAB_SIZE, HIDDEN_SIZE)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=GGMLQuantizationType.Q6_K)
    norm("output_norm")
    query_size, kv_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for layer in range(NUM_LAYERS):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            norm(prefix + name)
        for name, size in (("attn_q", query_size), ("attn_k", kv_size), ("attn_v", kv_size)):
            matrix(prefix + name, size, HIDDEN_SIZE)
            bias = rng.standard_normal(size).astype(np.float32) * WEIGHT_STD
            writer.add_tensor(f"{prefix}{name}.bias", bias)
        matrix(f"{prefix}attn_output", HIDDEN_SIZE, query_size)
        for name in ("ffn_gate", "ffn_up"):
            matrix(prefix + name, INTERMEDIATE_SIZE, HIDDEN_SIZE)
        matrix(f"{prefix}ffn_down", HIDDEN_SIZE, INTERMEDIATE_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    writer = GGUFWriter(arguments.out, "qwen2")
    add_hyperparameters(writer)
    add_tokenizer(writer, default_model())
    add_weights(writer, np.random.default_rng(arguments.seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
