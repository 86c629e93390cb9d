"""Write weights for a shape in the form of a large checkpoint: safetensors in several files."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from on_gpu.shapes import Shape

NUM_FILES = 4
NUM_NUMBERS = 1 << 25
ITEM_BYTES = {"BF16": 2, "I32": 4}
"""Number of random values. Weights repeat them, so that they are created quickly."""


def write_weights(shape: Shape, directory: Path) -> int:
    """Write random weights to `directory`, and return their size in bytes."""
    tensors = list(shape.stored_tensors())
    numbers = torch.empty(NUM_NUMBERS).normal_(0, 0.02).bfloat16()
    values = {
        is_matrix: memoryview(x.view(torch.uint8).numpy().tobytes())
        for is_matrix, x in ((True, numbers), (False, torch.ones_like(numbers)))
    }

    def write(index: int) -> int:
        mine = tensors[index::NUM_FILES]
        ends, end = [], 0
        for _, dtype, size in mine:
            end += ITEM_BYTES[dtype] * math.prod(size)
            ends.append(end)
        header = {
            name: {"dtype": dtype, "shape": size, "data_offsets": [start, end]}
            for (name, dtype, size), start, end in zip(mine, [0, *ends], ends, strict=False)
        }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with open(directory / f"model-{index}.safetensors", "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for _, dtype, size in mine:
                _repeat(values[len(size) > 1], ITEM_BYTES[dtype] * math.prod(size), file)
        return end

    with ThreadPoolExecutor(NUM_FILES) as threads:
        return sum(threads.map(write, range(NUM_FILES)))


def _repeat(data: memoryview, num_bytes: int, file: BinaryIO) -> None:
    for start in range(0, num_bytes, len(data)):
        file.write(data[: num_bytes - start])
