"""Prompts of text-to-text encoder-decoder models: the prompt is the encoder's input."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import numpy as np
import numpy.typing as npt

from ....protocol.arrays import int32_bytes
from ....protocol.config.model import SourceTextConfig
from ....protocol.messages import EncoderInput, TextPayload
from ...http.errors import bad_request
from ..prompts import Prompt, context_exceeded


def source_input(
    prompt: Prompt, config: SourceTextConfig, truncate: int | None, truncation_side: str | None
) -> EncoderInput:
    """Return the encoder input for a prompt, truncated if requested.

    Args:
        prompt: The prompt, with its token ids.
        config: How the model reads its source.
        truncate: Tokens to keep; -1 for as many as fit, None to keep all.
        truncation_side: The side to cut, `left` or `right`; None for `left`.

    Raises:
        APIError: The prompt is empty, or longer than the model reads (400).
    """
    token_ids = prompt.token_ids
    if truncate is not None:
        token_ids = _truncated(token_ids, truncate, config.max_tokens, truncation_side)
    if not len(token_ids):
        raise bad_request(prompt.param, f"{prompt.param} must have at least one token")
    if len(token_ids) > config.max_tokens:
        raise context_exceeded(
            prompt.param,
            f"This model reads a source of at most {config.max_tokens} tokens. However, "
            f"{prompt.param} has {len(token_ids)} tokens. Please reduce it.",
        )
    data = msgspec.msgpack.encode(TextPayload(int32_bytes(token_ids)))
    return EncoderInput(0, 0, sha256(data).digest(), len(token_ids), data)


def _truncated(
    token_ids: npt.NDArray[np.int32], truncate: int, limit: int, side: str | None
) -> npt.NDArray[np.int32]:
    if not (truncate == -1 or 1 <= truncate <= limit):
        raise bad_request(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or between 1 and {limit}, got {truncate}",
        )
    keep = limit if truncate == -1 else truncate
    return token_ids[:keep] if side == "right" else token_ids[-keep:]
