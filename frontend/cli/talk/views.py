"""The output of an answer while it arrives, as plain text."""

from __future__ import annotations

import sys
from typing import Self

from .answer import Piece


class PlainView:
    """Writes the text of the answer to stdout, without reasoning."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def show(self, piece: Piece) -> None:
        """Write the next piece of the answer."""
        if not piece.is_reasoning:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
