"""SmolLM2's first layers, for servers whose tests need its vocabulary and real weights, but no sensible text.

With all layers, most of the time of such a test would be arithmetic that is the same in each of them.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from engine.protocol.checkpoint.gguf import GGUFFile
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from support.gguf.finish import finish
from support.servers.server import default_model

NUM_LAYERS: Final = 4


@functools.cache
def shallow_model() -> str:
    """Return the path of the GGUF file, which is written once on a machine."""
    source = Path(default_model())
    stat = source.stat()
    name = f"engine-test-{os.getuid()}-{NUM_LAYERS}-layers-{stat.st_size}-{int(stat.st_mtime)}"
    path = Path(tempfile.gettempdir()) / name / source.name
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        _write_first_layers(source, part)
        part.rename(path)
    return str(path)


def _write_first_layers(source: Path, path: Path) -> None:
    file = GGUFFile(source)
    writer = GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key == "general.architecture":
            continue
        value = NUM_LAYERS if key == "llama.block_count" else value
        value = value.tolist() if isinstance(value, np.ndarray) else value
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, tensor in file.tensors.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= NUM_LAYERS:
            continue
        rows = file.data(tensor).reshape(*tensor.shape[:-1], -1)
        kind = GGMLQuantizationType(tensor.ggml_type)
        writer.add_tensor(name, rows, raw_dtype=kind)
    finish(writer)
