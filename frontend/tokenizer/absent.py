"""The tokenizer of a server that was started with --skip-tokenizer-init."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from ...protocol.errors import ParameterError
from .tokenizer import Tokenizer

NO_TOKENIZER = "this server was started with --skip-tokenizer-init"


class AbsentTokenizer(Tokenizer):
    """A tokenizer that cannot encode, and that decodes every token to an empty text."""

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.decoder = tokenizers.decoders.ByteLevel()
        super().__init__(backend, Path())

    def move_long_texts(self) -> None:
        """Do nothing, because no text is encoded."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raise ParameterError, because there is no tokenizer."""
        raise ParameterError("prompt", f"must be token ids: {NO_TOKENIZER}")

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return ""."""
        return ""

    def read_config(self) -> dict[str, Any]:
        """Return an empty configuration."""
        return {}
