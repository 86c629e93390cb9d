"""Random weights in the block formats of llama.cpp, and the default model's tokenizer, for GGUF files of benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from numpy.typing import NDArray

BLOCK_ELEMENTS = 256
WEIGHT_STD = 0.02

Blocks = NDArray[np.uint8]


def q4_k(rng: np.random.Generator, *shape: int) -> Blocks:
    """Return random blocks: float16 scale and minimum, 12 bytes of 6-bit scales and minima, 128 of 4-bit values."""
    blocks = rng.integers(0, 256, (np.prod(shape) // BLOCK_ELEMENTS, 144), np.uint8)
    scale = WEIGHT_STD / 257  # the standard deviation of scale * value - 7.5 * minimum
    blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def q6_k(rng: np.random.Generator, *shape: int) -> Blocks:
    """Return random blocks: 192 bytes of 6-bit values, 16 int8 scales, a float16 scale."""
    blocks = rng.integers(0, 256, (np.prod(shape) // BLOCK_ELEMENTS, 210), np.uint8)
    scale = WEIGHT_STD / 1365  # the standard deviation of an int8 times a 6-bit integer
    blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def q8_0(rng: np.random.Generator, *shape: int) -> Blocks:
    """Return random blocks: a float16 scale and 32 int8 values."""
    blocks = rng.integers(0, 256, (np.prod(shape) // 32, 34), np.uint8)
    scale = WEIGHT_STD / 74  # the standard deviation of an int8
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def mxfp4(rng: np.random.Generator, *shape: int) -> Blocks:
    """Return random blocks: the exponent of a power of two, and 32 values of FP4 (E2M1)."""
    blocks = rng.integers(0, 256, (np.prod(shape) // 32, 17), np.uint8)
    blocks[:, 0] = 127 - 7  # 2**-7 times 2.9, the standard deviation of a value of FP4
    return blocks.reshape(*shape[:-1], -1)


class RandomTensors:
    """Adds random tensors to a GGUF file."""

    def __init__(self, writer: GGUFWriter, rng: np.random.Generator) -> None:
        self.writer = writer
        self.rng = rng

    def matrix(self, name: str, *shape: int) -> None:
        """Add a matrix, or a stack of matrices, in Q4_K."""
        blocks = q4_k(self.rng, *shape)
        self.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_K)

    def vocabulary(self, name: str, *shape: int) -> None:
        """Add an embedding or a head in Q6_K, the type in llama.cpp's Q4_K mixtures."""
        blocks = q6_k(self.rng, *shape)
        self.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q6_K)

    def bytes(self, name: str, *shape: int) -> None:
        """Add a matrix in Q8_0."""
        blocks = q8_0(self.rng, *shape)
        self.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)

    def mxfp4(self, name: str, *shape: int) -> None:
        """Add a stack of matrices in MXFP4."""
        blocks = mxfp4(self.rng, *shape)
        self.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.MXFP4)

    def floats(self, name: str, *shape: int) -> None:
        """Add random numbers in float32."""
        values = self.rng.standard_normal(shape, np.float32) * np.float32(WEIGHT_STD)
        self.writer.add_tensor(name, values)

    def norm(self, name: str, size: int) -> None:
        """Add a norm with weights of 1."""
        self.writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))


def add_tokenizer(writer: GGUFWriter, source: str, vocab_size: int) -> None:
    """Add the tokenizer of the GGUF file `source`, filled up with unused tokens."""
    fields = GGUFReader(source).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens = value("tokens")
    num_unused = vocab_size - len(tokens)
    writer.add_tokenizer_model(value("model"))
    writer.add_tokenizer_pre(value("pre"))
    writer.add_token_list(tokens + [f"[unused{i}]" for i in range(num_unused)])
    writer.add_token_types(value("token_type") + [int(TokenType.UNUSED)] * num_unused)
    writer.add_token_merges(value("merges"))
    writer.add_bos_token_id(value("bos_token_id"))
    writer.add_eos_token_id(value("eos_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())


def write_gguf(writer: GGUFWriter) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
