"""The request body of Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

import msgspec

from . import Int


class TextEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /embed`."""

    inputs: str | dict[str, Any] | list[str | Int | dict[str, Any] | list[str | Int]] | None = None
    model: str | None = None
    normalize: bool = True
    truncate: bool = False
    # "Right" if absent.
    truncation_direction: str | None = None
    prompt_name: str | None = None
    dimensions: Int | None = None
