"""Encoder inputs: prompts of embeddings instead of tokens, and the sources of encoder-decoder models.

Workers treat the embeddings of a prompt like the outputs of an encoder. A source has no place in the prompt.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.arrays import int32_bytes
from ...protocol.config import EngineConfig
from ...protocol.config.model import SourceTextConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.encoder_inputs.payloads import AudioPayload, TextPayload
from ...protocol.messages import AppendInputs, EngineCoreRequest
from ...protocol.sampling_params import SamplingParams

DTYPES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Dtype -> bytes per number."""

MAX_INPUT_TOKENS: Final = 256
"""Maximum tokens of one encoder input. Several inputs let a step compute a part of the prompt."""


class Embeddings(msgspec.Struct, frozen=True):
    """A tensor of one of `DTYPES`: its little-endian numbers in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def are_finite(self) -> bool:
        """Return whether all numbers are finite."""
        if self.dtype == "bfloat16":
            bits = np.frombuffer(self.data, "<u2")
            return bool(((bits & 0x7F80) != 0x7F80).all())
        numbers = np.frombuffer(self.data, "<f4" if self.dtype == "float32" else "<f2")
        return bool(np.isfinite(numbers).all())


def encoder_inputs_of(embeddings: Embeddings, config: EngineConfig) -> list[EncoderInput]:
    """Return embeddings [T, D] as encoder inputs of at most `MAX_INPUT_TOKENS` tokens, with content hashes."""
    scheduler = config.scheduler
    num_tokens, width = embeddings.shape
    most = min(MAX_INPUT_TOKENS, scheduler.encoder_budget, scheduler.encoder_cache_capacity)
    row_bytes = width * DTYPES[embeddings.dtype]
    inputs = []
    for start in range(0, num_tokens, most):
        count = min(most, num_tokens - start)
        data = embeddings.data[start * row_bytes : (start + count) * row_bytes]
        digest = sha256(f"{embeddings.dtype} {width} ".encode() + data).digest()
        inputs.append(EncoderInput(start, count, digest, count, data, embeddings=embeddings.dtype))
    return inputs


def encoder_source(payload: AudioPayload | TextPayload, size: int) -> EncoderInput:
    """Return the encoder input for a payload of which the encoder makes `size` vectors."""
    data = msgspec.msgpack.encode(payload)
    return EncoderInput(0, 0, sha256(data).digest(), size, data)


def text_source(
    token_ids: npt.NDArray[np.int32], images: Sequence[EncoderInput] = ()
) -> EncoderInput:
    """Return the encoder input for a text, in which `images` replace some tokens."""
    return encoder_source(TextPayload(int32_bytes(token_ids), tuple(images)), len(token_ids))


def grow_request(
    request: EngineCoreRequest, inputs: list[EncoderInput], *, is_last: bool
) -> AppendInputs:
    """Append inputs to the copy of an open request, and return the message that appends them in a core.

    The copy is for a core that replaces the current one. The last inputs limit the output to their tokens.
    """
    request.encoder_inputs = [*request.encoder_inputs, *inputs]
    request.is_open = not is_last
    if is_last and request.encoder_inputs:
        last, params = request.encoder_inputs[-1], request.sampling_params
        most = last.position + last.num_tokens - len(request.prompt_token_ids) // 4
        limit = min(most, params.max_tokens or most)
        request.sampling_params = msgspec.structs.replace(params, max_tokens=limit)
    return AppendInputs(request.request_index, inputs, is_last)


def answer_start(
    config: SourceTextConfig, token_ids: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32]:
    """Return the decoder's prompt: the model's own, or its first token and the beginning of the answer.

    The beginning replaces the token that the model's configuration forces after the first one.
    """
    if token_ids is None:
        return np.array(config.start_token_ids, np.int32)
    return np.concatenate((config.start_token_ids[:1], token_ids), dtype=np.int32)


def pooled_source(
    config: SourceTextConfig | None, token_ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], list[EncoderInput]]:
    """Return the decoder's prompt and the encoder inputs for a text whose last token is pooled.

    The encoder of an encoder-decoder model reads the text, and its decoder reads it after the first token of an answer,
    without its last token and what follows the end token. Other models read the text itself.
    """
    if config is None:
        return token_ids, []
    ends = np.flatnonzero(token_ids == config.end_token_id)
    last = int(ends[-1]) if len(ends) else len(token_ids) - 1
    first = token_ids[-1:] if config.begins_with_last else config.start_token_ids[:1]
    prompt = np.concatenate((first, token_ids[:last]), dtype=np.int32)
    return prompt, [text_source(token_ids)]


def without_bad_words(params: SamplingParams, config: SourceTextConfig) -> SamplingParams:
    """Return sampling parameters that also exclude the tokens that the model must never generate."""
    bad_words = (*params.bad_words_token_ids, *config.bad_words_token_ids)
    return msgspec.structs.replace(params, bad_words_token_ids=bad_words)
