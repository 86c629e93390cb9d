"""The end tokens that the files of a tokenizer name."""

from __future__ import annotations

from pathlib import Path

from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.checkpoint.gguf_config.fields import GGUFFields
from .config import TokenizerConfig


def tokenizer_eos(path: Path) -> list[int]:
    """Return the ids of the tokenizer's end tokens; [] if its files are missing or do not name one."""
    if path.suffix == ".gguf":
        return gguf_eos(GGUFFile(path))
    directory = path if path.is_dir() else path.parent
    config = TokenizerConfig(directory)
    text = config.named_tokens.get("eos_token")
    # A late import, because a GGUF file has no such tokenizer.
    from .conversion.world import world_eos

    if ids := world_eos(directory, text):
        return ids
    id_ = None if text is None else config.added_token_id(text)
    return [] if id_ is None else [id_]


def gguf_eos(gguf: GGUFFile) -> list[int]:
    """Return the ids of the end tokens that a GGUF file names."""
    return GGUFFields(gguf.metadata, gguf.path, "tokenizer.ggml.").token_ids("eos_token_id")
