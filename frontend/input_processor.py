"""From a sequence request to the message that a core understands, or to an error a user understands."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ..protocol.arrays import Int32Array, int32_bytes
from ..protocol.config import EngineConfig
from ..protocol.errors import ParameterError
from ..protocol.grammar import PARAM as STRUCTURED_OUTPUTS
from ..protocol.messages import EngineCoreRequest
from ..protocol.sampling_params import MAX_SEED, SamplingParams
from .off_loop import OffLoop
from .request_group import SequenceRequest
from .tokenizer import Tokenizer

TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]

MAX_ENTRIES_IN_ALL: Final = 1 << 22
"""Entries of the lists of a request, which every sequence takes along."""

MAX_SPEC_CHARACTERS_IN_ALL: Final = 1 << 26
"""Likewise, characters of its schema or grammar."""

CHARACTERS_A_WORD: Final = 32
"""A word to encode costs as much as so many characters of a text."""


class InputProcessor:
    """Checks requests against the model and fills in what they leave open."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, off_loop: OffLoop) -> None:
        self._model = config.model
        self._max_logprobs = config.frontend.max_logprobs
        self._tokenizer = tokenizer
        self._off_loop = off_loop
        self._default_max_tokens = config.frontend.default_sampling.get("max_tokens")
        self._seeds = _Seeds(config.model.seed)

    async def process(
        self, sequences: list[SequenceRequest], arrival_time: float
    ) -> list[EngineCoreRequest]:
        """The messages for the core, but for their indices and block hashes.

        What sequences have in common (the same objects) is looked at once. Raises ParameterError for whatever this
        model cannot serve.
        """
        prompts: dict[int, tuple[int, bytes]] = {}
        bad_words: dict[tuple[int, ...], TokenSequences] = {}
        counts = Counter(_lists_of(sequence.params) for sequence in sequences)
        for sequence in sequences:
            prompt, params = sequence.prompt_token_ids, sequence.params
            if id(prompt) not in prompts:
                token_ids = self._prompt(prompt)
                prompts[id(prompt)] = len(token_ids), int32_bytes(token_ids)
            lists = _lists_of(params)
            if lists not in bad_words:
                params.verify_lists(vocab_size=self._model.vocab_size)
                bad_words[lists] = await self._bad_words(params)
                _verify_volume(params, bad_words[lists], counts[lists])
        return [
            self._message(
                sequence,
                *prompts[id(sequence.prompt_token_ids)],
                bad_words[_lists_of(sequence.params)],
                arrival_time,
            )
            for sequence in sequences
        ]

    def _message(
        self,
        request: SequenceRequest,
        num_prompt_tokens: int,
        prompt: bytes,
        bad_words: TokenSequences,
        arrival_time: float,
    ) -> EngineCoreRequest:
        params = request.params
        if params.stop and not params.detokenize:
            raise ParameterError("stop", "strings need detokenize=true")
        params = msgspec.structs.replace(
            params,
            n=1,
            stop=(),
            bad_words=(),
            bad_words_token_ids=bad_words,
            max_tokens=self._max_tokens(num_prompt_tokens, params.max_tokens),
            seed=self._seeds.draw() if params.seed is None else params.seed,
        )
        params.verify_numbers(vocab_size=self._model.vocab_size, max_logprobs=self._max_logprobs)
        return EngineCoreRequest(
            request_index=0,
            prompt_token_ids=prompt,
            sampling_params=params,
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

    async def _bad_words(self, params: SamplingParams) -> TokenSequences:
        words = params.bad_words
        if not words:
            return params.bad_words_token_ids
        size = sum(map(len, words)) + CHARACTERS_A_WORD * len(words)
        encoded = await self._off_loop.run(size, self._encode_bad_words, words)
        return params.bad_words_token_ids + encoded

    def _encode_bad_words(self, words: tuple[str, ...]) -> TokenSequences:
        """Each word as it begins a text and as it follows a space, which are other tokens."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            if not bare:
                raise ParameterError("bad_words", f"must not contain an empty word, got {word!r}")
            for spelling in (bare, " " + bare):
                sequences[tuple(self._tokenizer.encode(spelling, add_special_tokens=False))] = None
        return tuple(sequences)


def _lists_of(params: SamplingParams) -> tuple[int, ...]:
    """The identity of everything in the parameters that may be long."""
    return (
        id(params.stop),
        id(params.stop_token_ids),
        id(params.allowed_token_ids),
        id(params.logit_bias),
        id(params.bad_words),
        id(params.bad_words_token_ids),
        id(params.structured_output),
    )


def _verify_volume(params: SamplingParams, bad_words: TokenSequences, num_sequences: int) -> None:
    """Raise ParameterError for lists that are too much if each of the sequences takes them along."""
    constraint = params.structured_output
    sizes = (
        ("stop_token_ids", len(params.stop_token_ids), MAX_ENTRIES_IN_ALL, "entries"),
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_ENTRIES_IN_ALL, "entries"),
        ("logit_bias", len(params.logit_bias or ()), MAX_ENTRIES_IN_ALL, "entries"),
        ("bad_words", sum(map(len, bad_words)), MAX_ENTRIES_IN_ALL, "tokens"),
        (
            STRUCTURED_OUTPUTS,
            0 if constraint is None else len(constraint.spec),
            MAX_SPEC_CHARACTERS_IN_ALL,
            "characters",
        ),
    )
    for name, size, limit, unit in sizes:
        if size * num_sequences > limit:
            raise ParameterError(
                name,
                f"has {size} {unit} for each of {num_sequences} sequences, "
                f"{size * num_sequences} in all, at most {limit} are allowed",
            )


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
