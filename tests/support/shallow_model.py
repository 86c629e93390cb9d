"""SmolLM2's first layers, for servers whose tests need its vocabulary and real weights, but no sensible text.

With all layers, most of the time of such a test would be arithmetic that is the same in each of them.
"""

from __future__ import annotations

import functools
import os
import struct
import tempfile
from pathlib import Path
from typing import Final

from engine.protocol.checkpoint.gguf import GGUFFile
from support.server import default_model

NUM_LAYERS: Final = 4
ALIGNMENT: Final = 32
COUNT_KEY: Final = b"llama.block_count"


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
        part.write_bytes(_first_layers(source))
        part.rename(path)
    return str(path)


def _first_layers(source: Path) -> bytes:
    file, data = GGUFFile(source), source.read_bytes()
    names = list(file.tensors)
    end_of_values = data.index(struct.pack("<Q", len(names[0])) + names[0].encode())
    values = bytearray(data[16:end_of_values])
    # The number of values and the type of this one precede them.
    struct.pack_into("<I", values, values.index(COUNT_KEY) + len(COUNT_KEY) + 4, NUM_LAYERS)

    kept = [name for name in names if name[:4] != "blk." or int(name.split(".")[1]) < NUM_LAYERS]
    head = bytearray(b"GGUF" + struct.pack("<IQ", 3, len(kept)) + values)
    body = bytearray()
    for name in kept:
        tensor = file.tensors[name]
        shape = tensor.shape[::-1]
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.ggml_type, len(body))
        body += file.data(tensor).tobytes()
        body += bytes(-len(body) % ALIGNMENT)
    return bytes(head + bytes(-len(head) % ALIGNMENT) + body)
