"""Add the text of a prompt to its images, for encoders that read both (InstructBLIP)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec

from ...protocol.arrays import int32_bytes
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.encoder_inputs.payloads import EmbeddingPayload, ImagePayload
from ...protocol.errors import ParameterError
from ..tokenizer.load import load_tokenizer

_decoder: Final = msgspec.msgpack.Decoder(ImagePayload | EmbeddingPayload)
_encoder: Final = msgspec.msgpack.Encoder()


class Instructions:
    """The tokenizer in `directory`, with which an encoder reads texts of at most `max_tokens` tokens."""

    def __init__(self, directory: str, max_tokens: int) -> None:
        self._tokenizer = load_tokenizer(directory)
        self._max_tokens = max_tokens

    def add_text(self, inputs: Sequence[EncoderInput], text: str) -> list[EncoderInput]:
        """Return encoder inputs with the tokens of a text. Embeddings that a client sent already contain one.

        Raises:
            ParameterError: The text is too long.
        """
        token_ids = self._tokenizer.encode(text)
        if len(token_ids) > self._max_tokens:
            raise ParameterError(
                "messages",
                f"have a text of {len(token_ids)} tokens of the image encoder, which reads at most "
                f"{self._max_tokens}; shorten it",
            )
        instruction = int32_bytes(token_ids)
        return [self._with_instruction(item, instruction) for item in inputs]

    def _with_instruction(self, item: EncoderInput, instruction: bytes) -> EncoderInput:
        image = _decoder.decode(item.data)
        if isinstance(image, EmbeddingPayload):
            return item
        return msgspec.structs.replace(
            item,
            data=_encoder.encode(msgspec.structs.replace(image, instruction=instruction)),
            content_hash=sha256(item.content_hash + instruction).digest(),
        )
