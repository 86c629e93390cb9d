"""From a sequence request to the message that a core understands, or to an error a user understands."""

from __future__ import annotations

import hashlib
import os

import msgspec
import numpy as np
import numpy.typing as npt

from ..protocol.arrays import Int32Array, int32_bytes
from ..protocol.config import EngineConfig
from ..protocol.errors import ParameterError
from ..protocol.messages import EngineCoreRequest
from ..protocol.sampling_params import MAX_SEED
from .request_group import SequenceRequest
from .tokenizer import Tokenizer


class InputProcessor:
    """Checks requests against the model and fills in what they leave open."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._model = config.model
        self._max_logprobs = config.frontend.max_logprobs
        self._tokenizer = tokenizer
        self._default_max_tokens = config.frontend.default_sampling.get("max_tokens")
        self._seeds = _Seeds(config.model.seed)

    def process(self, request: SequenceRequest, arrival_time: float) -> EngineCoreRequest:
        """The message for the core, but for its index and block hashes.

        Raises ParameterError for whatever this model cannot serve.
        """
        prompt = self._prompt(request.prompt_token_ids)
        params = request.params
        max_tokens = self._max_tokens(len(prompt), params.max_tokens)
        if params.stop and not params.detokenize:
            raise ParameterError("stop", "strings need detokenize=true")
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            seed=self._seeds.draw() if params.seed is None else params.seed,
            bad_words_token_ids=params.bad_words_token_ids + self._bad_words(params.bad_words),
        )
        params.verify(vocab_size=self._model.vocab_size, max_logprobs=self._max_logprobs)
        return EngineCoreRequest(
            request_index=0,
            prompt_token_ids=int32_bytes(prompt),
            sampling_params=msgspec.structs.replace(params, n=1, stop=(), bad_words=()),
            arrival_time=arrival_time,
            eos_token_ids=self._model.eos_token_ids,
            priority=request.priority,
            tenant=request.tenant,
            deadline=request.deadline,
        )

    def _prompt(self, token_ids: npt.ArrayLike) -> Int32Array:
        try:
            prompt = np.asarray(token_ids)
        except ValueError:
            raise ParameterError("prompt", "must be one list of token ids") from None
        if prompt.ndim != 1:
            raise ParameterError(
                "prompt", f"must be one list of token ids, got shape {prompt.shape}"
            )
        if not len(prompt):
            raise ParameterError("prompt", "must not be empty: it has 0 tokens")
        if prompt.dtype.kind not in "iu":
            raise ParameterError("prompt", "must consist of integer token ids below 2**63")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._model.vocab_size:
            raise ParameterError(
                "prompt",
                f"has token id {low if low < 0 else high}, "
                f"outside the vocabulary [0, {self._model.vocab_size})",
            )
        limit = self._model.max_model_len
        if len(prompt) >= limit:
            raise ParameterError(
                "prompt",
                f"is too long: it has {len(prompt)} tokens. This model's maximum context length is "
                f"{limit} tokens, prompt and completion together, so at most {limit - 1} fit",
            )
        return prompt.astype(np.int32, copy=False)

    def _max_tokens(self, num_prompt_tokens: int, given: int | None) -> int:
        limit = self._model.max_model_len
        remaining = limit - num_prompt_tokens
        if given is None:
            if self._default_max_tokens is None:
                return remaining
            return min(int(self._default_max_tokens), remaining)
        if given > remaining:
            raise ParameterError(
                "max_tokens",
                f"is too large: {given}. This model's maximum context length is {limit} tokens and "
                f"the prompt has {num_prompt_tokens}, so at most {remaining} can be generated",
            )
        return given

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space, which are other tokens."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            if not bare:
                raise ParameterError("bad_words", f"must not contain an empty word, got {word!r}")
            for spelling in (bare, " " + bare):
                sequences[tuple(self._tokenizer.encode(spelling, add_special_tokens=False))] = None
        return tuple(sequences)


class _Seeds:
    """Seeds that never repeat: a keyed hash of a counter. With `base` 0 no one can guess them."""

    def __init__(self, base: int) -> None:
        self._key = base.to_bytes(8, "little") if base else os.urandom(32)
        self._counter = 0

    def draw(self) -> int:
        self._counter += 1
        count = self._counter.to_bytes(8, "little")
        digest = hashlib.blake2b(count, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") & MAX_SEED
