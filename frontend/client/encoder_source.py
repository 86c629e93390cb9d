"""What an encoder-decoder model reads besides its prompt: one encoder input that has no place in the prompt."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.arrays import int32_bytes
from ...protocol.config.model import SourceTextConfig
from ...protocol.messages import AudioPayload, EncoderInput, TextPayload
from ...protocol.sampling_params import SamplingParams


def encoder_source(payload: AudioPayload | TextPayload, size: int) -> EncoderInput:
    """Return the encoder input for a payload of which the encoder makes `size` vectors."""
    data = msgspec.msgpack.encode(payload)
    return EncoderInput(0, 0, sha256(data).digest(), size, data)


def text_source(token_ids: npt.NDArray[np.int32]) -> EncoderInput:
    """Return the encoder input for a text."""
    return encoder_source(TextPayload(int32_bytes(token_ids)), len(token_ids))


def answer_start(
    config: SourceTextConfig, token_ids: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32]:
    """Return the decoder's prompt: the model's own, or its first token and the beginning of the answer.

    The beginning replaces the token that the model's configuration forces after the first one.
    """
    if token_ids is None:
        return np.array(config.start_token_ids, np.int32)
    return np.concatenate((config.start_token_ids[:1], token_ids), dtype=np.int32)


def without_bad_words(params: SamplingParams, config: SourceTextConfig) -> SamplingParams:
    """Return sampling parameters that also exclude the tokens that the model must never generate."""
    bad_words = (*params.bad_words_token_ids, *config.bad_words_token_ids)
    return msgspec.structs.replace(params, bad_words_token_ids=bad_words)
