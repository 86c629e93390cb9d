"""The chunks of vLLM's streams of transcriptions, which clients choose with the fields of their usage."""

from __future__ import annotations

import time

from ..logprobs import Json


class TranscriptionChunks:
    """Makes the chunks of one stream.

    Args:
        kind: The name of the task in `object`.
        request_id: The id of the request.
        model: The name of the model.
        has_usage: True for a last chunk with the usage.
        is_continuous: True for the usage so far in every other chunk as well.

    Attributes:
        num_prompt_tokens: The tokens of all prompts so far, which the caller counts.
    """

    def __init__(
        self, kind: str, request_id: str, model: str, *, has_usage: bool, is_continuous: bool
    ) -> None:
        self._fields: Json = {
            "id": request_id,
            "object": f"{kind}.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._has_usage, self._is_continuous = has_usage, has_usage and is_continuous
        self._num_generated = 0
        self.num_prompt_tokens = 0

    def write(self, text: str, num_tokens: int) -> Json:
        """Return the chunk of a piece of text."""
        self._num_generated += num_tokens
        return self._chunk(text, None)

    def end(self, num_generated: int) -> list[Json]:
        """Return the chunks after a text for which `num_generated` tokens were generated."""
        self._num_generated = num_generated
        last = self._chunk("", "stop")
        if not self._has_usage:
            return [last]
        return [last, self._fields | {"choices": [], "usage": self._usage()}]

    def _chunk(self, text: str, reason: str | None) -> Json:
        choice = {"delta": {"content": text}, "finish_reason": reason, "stop_reason": None}
        chunk = self._fields | {"choices": [choice]}
        return chunk | {"usage": self._usage()} if self._is_continuous else chunk

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self._num_generated,
            "total_tokens": self.num_prompt_tokens + self._num_generated,
        }
