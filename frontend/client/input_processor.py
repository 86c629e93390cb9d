"""Validate a sequence request and convert it to the message for the core."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.arrays import Int32Array, int32_bytes
from ...protocol.config import EngineConfig
from ...protocol.config.hidden_states import StatesMode
from ...protocol.errors import ParameterError, counted
from ...protocol.grammars.expressions import PARAM as STRUCTURED_OUTPUTS
from ...protocol.messages import EngineCoreRequest
from ...protocol.sampling_params import (
    MAX_SEED,
    DryParams,
    ReturnedStates,
    SamplingParams,
    StatesOf,
    StructuredOutput,
)
from ..http.shown_values import echo
from ..tokenizer.absent import NO_TOKENIZER
from ..tokenizer.breakers import Breakers
from ..tokenizer.stop_patterns import verify_patterns
from ..tokenizer.token_ids import token_id_array
from ..tokenizer.tokenizer import Tokenizer
from .executor import ThreadExecutor
from .sequence_io import SEQUENCES_AT_ONCE, SequenceRequest, TokenIds

TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]

MAX_TOTAL_ENTRIES: Final = 1 << 22
"""Maximum total entries of a request's lists (such as logit_bias), counted once per sequence."""

MAX_TOTAL_SPEC_CHARACTERS: Final = 1 << 26
"""Maximum total characters of a request's schema or grammar, counted once per sequence."""

MAX_TOTAL_PROMPT_LOGPROBS: Final = 1 << 21
"""Maximum total entries of a request's prompt logprobs.

They arrive in one message, and decoding that message blocks all other requests.
"""

MAX_TOTAL_ENCODER_BYTES: Final = 1 << 27
"""Maximum total bytes of a request's preprocessed images, counted once per sequence.

A sequence and its images are sent in one message.
"""

CHARACTERS_PER_WORD: Final = 32
"""The cost of encoding one word, expressed as a number of characters of text."""


class InputProcessor:
    """Validates requests against the model and fills in default parameters."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, executor: ThreadExecutor
    ) -> None:
        self._model = config.model
        self._max_logprobs = config.frontend.max_logprobs
        self._hidden_states = config.scheduler.hidden_states
        self._tokenizer = tokenizer
        self._executor = executor
        self._default_max_tokens = config.frontend.default_sampling.get("max_tokens")
        self._seeds = _Seeds(config.model.seed)
        self._breakers = Breakers(tokenizer, config.model.vocab_size)

    async def process(
        self, sequences: list[SequenceRequest], arrival_time: float
    ) -> list[EngineCoreRequest]:
        """Return the messages for the core, still without request indices and block hashes.

        Objects that several sequences share are processed once.

        Raises:
            ParameterError: A parameter is invalid for this model.
        """
        prompts: dict[int, tuple[int, bytes]] = {}
        encoded: dict[tuple[int, ...], _EncodedTexts] = {}
        counts = Counter(_lists_of(sequence.params) for sequence in sequences)
        for i, sequence in enumerate(sequences, 1):
            if i % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
            prompt, params = sequence.prompt_token_ids, sequence.params
            params.verify_types()
            if id(prompt) not in prompts:
                token_ids = self._prompt(
                    prompt,
                    generates=sequence.pooling is None,
                    has_audio=bool(sequence.encoder_inputs),
                )
                prompts[id(prompt)] = len(token_ids), int32_bytes(token_ids)
            lists = _lists_of(params)
            if lists not in encoded:
                if not self._model.has_tokenizer:
                    _verify_without_text(params)
                params.verify_lists(vocab_size=self._model.vocab_size)
                encoded[lists] = _EncodedTexts(
                    await self._bad_words(params), await self._dry(params.dry)
                )
                _verify_volume(params, encoded[lists], counts[lists])
        _verify_num_logprobs(
            [(len(prompts[id(s.prompt_token_ids)][1]) // 4, s.params) for s in sequences],
            self._model.vocab_size,
        )
        _verify_images(sequences)
        predictions = _encode_predictions(sequences)
        messages: list[EngineCoreRequest] = []
        for sequence in sequences:
            prompt_of = prompts[id(sequence.prompt_token_ids)]
            texts = encoded[_lists_of(sequence.params)]
            predicted = predictions[id(sequence.predicted_token_ids)]
            messages.append(self._message(sequence, *prompt_of, texts, predicted, arrival_time))
            if len(messages) % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return messages

    def _message(
        self,
        request: SequenceRequest,
        num_prompt_tokens: int,
        prompt: bytes,
        texts: _EncodedTexts,
        predicted: bytes,
        arrival_time: float,
    ) -> EngineCoreRequest:
        params = request.params
        if params.stop and not params.detokenize:
            raise ParameterError(
                "stop", "strings need detokenize=true; set it or use stop_token_ids"
            )
        if params.stop_regex:
            if not params.detokenize:
                raise ParameterError("stop_regex", "needs detokenize=true")
            verify_patterns(params.stop_regex)
        params = msgspec.structs.replace(
            params,
            n=1,
            stop=(),
            stop_regex=(),
            bad_words=(),
            bad_words_token_ids=texts.bad_words,
            dry=texts.dry,
            max_tokens=1
            if request.pooling is not None
            else self._max_tokens(num_prompt_tokens, params.max_tokens),
            seed=self._seeds.draw() if params.seed is None else params.seed,
            returned_states=None if request.pooling or request.is_warm_up else self._states(params),
        )
        if self._model.diffusion is not None and request.pooling is None:
            request.params.verify_for_blocks()
        params.verify_numbers(vocab_size=self._model.vocab_size, max_logprobs=self._max_logprobs)
        params.repetition_detection = None
        return EngineCoreRequest(
            request_index=0,
            prompt_token_ids=prompt,
            sampling_params=params,
            arrival_time=arrival_time,
            eos_token_ids=self._model.eos_token_ids,
            priority=request.priority,
            tenant=request.tenant,
            deadline=request.deadline,
            trace_headers=request.trace_headers,
            predicted_token_ids=predicted,
            pooling_params=request.pooling,
            lora=request.lora,
            encoder_inputs=request.encoder_inputs,
            is_open=request.is_open,
            is_warm_up=request.is_warm_up,
            kv_transfer_params=request.kv_transfer_params,
        )

    def _prompt(self, token_ids: TokenIds, *, generates: bool, has_audio: bool) -> Int32Array:
        if self._model.audio is not None and not has_audio:
            name = self._model.served_names[0]
            raise ParameterError(
                "prompt",
                f"cannot be continued: {name} is a speech model; use /v1/audio/transcriptions",
            )
        if not generates and self._model.diffusion is not None:
            name = self._model.served_names[0]
            raise ParameterError("input", f"cannot be embedded: {name} is a block-diffusion model")
        if generates and not self._model.generates:
            name = self._model.served_names[0]
            if self._model.classifier is not None:
                problem = f"{name} is a classifier; use /classify or /v1/score"
            elif not self._model.is_encoder:
                problem = f"{name} has no output projection and only embeds; use /v1/embeddings"
            else:
                problem = f"{name} is an encoder, which only embeds text; use /v1/embeddings"
            raise ParameterError("prompt", f"cannot be continued: {problem}")
        if isinstance(token_ids, np.ndarray):
            prompt: npt.NDArray[Any] = token_ids
        else:
            try:
                prompt = token_id_array(token_ids)
            except ValueError:
                raise ParameterError(
                    "prompt", "must be a list of integer token ids below 2**63"
                ) from None
        if prompt.ndim != 1:
            raise ParameterError(
                "prompt", f"must be a one-dimensional list of token ids, got shape {prompt.shape}"
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
        if not generates and len(prompt) > self._model.max_pooled_tokens:
            raise ParameterError(
                "prompt",
                f"is too long: it has {len(prompt)} tokens, and at most {self._model.max_pooled_tokens} fit",
            )
        if generates and len(prompt) >= limit:
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

    def _states(self, params: SamplingParams) -> ReturnedStates | None:
        """Return the hidden states that a sequence returns: the given ones, or those that the server always writes."""
        states, returned = self._hidden_states, params.returned_states
        if states is None or states.directory is None:
            if returned is None or returned.in_file:
                return None
            needed = StatesMode.LAST if returned.tokens is StatesOf.LAST else StatesMode.FULL
            if states is None or needed not in (states.mode, StatesMode.LAST):
                problem = f'needs the server option --hidden-states \'{{"mode": "{needed}"}}\''
                raise ParameterError("return_hidden_states", problem)
            return returned
        if returned is None:
            return ReturnedStates(StatesOf.PROMPT, in_file=True)
        if not returned.in_file:
            problem = "is not supported, because this server writes hidden states to files"
            raise ParameterError("return_hidden_states", problem)
        if returned.path and not states.allow_custom_save_path:
            problem = "needs allow_custom_save_path in the server's kv_connector_extra_config"
            raise ParameterError("kv_transfer_params.hidden_states_path", problem)
        if returned.path and not os.path.isabs(returned.path):
            problem = f"must be an absolute path, got {returned.path!r}"
            raise ParameterError("kv_transfer_params.hidden_states_path", problem)
        return returned

    async def _bad_words(self, params: SamplingParams) -> TokenSequences:
        words = params.bad_words
        if not words:
            return params.bad_words_token_ids
        size = sum(map(len, words)) + CHARACTERS_PER_WORD * len(words)
        encoded = await self._executor.run(size, self._encode_bad_words, words)
        return params.bad_words_token_ids + encoded

    async def _dry(self, dry: DryParams | None) -> DryParams | None:
        """Return the penalty without the texts of its breakers, whose tokens are added; None if it has no effect."""
        if dry is None or not dry.multiplier:
            return None
        texts = dry.sequence_breakers
        if not texts:
            return dry
        size = len(texts) * self._model.vocab_size
        added = await self._executor.run(size, self._breakers.find, texts)
        return msgspec.structs.replace(
            dry, sequence_breakers=(), breaker_token_ids=dry.breaker_token_ids + added
        )

    def _encode_bad_words(self, words: tuple[str, ...]) -> TokenSequences:
        """Encode each word with and without a leading space, because the two have different tokens."""
        sequences: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            bare = word.lstrip()
            if not bare:
                raise ParameterError(
                    "bad_words", f"must not contain an empty word, got {echo(word)} at {i}"
                )
            for spelling in (bare, " " + bare):
                sequences[tuple(self._tokenizer.encode_output(spelling))] = None
        return tuple(sequences)


class _EncodedTexts(NamedTuple):
    """The tokens of the texts among a request's parameters."""

    bad_words: TokenSequences
    dry: DryParams | None


def _lists_of(params: SamplingParams) -> tuple[int, ...]:
    """Return the object identities of all parameters that may be long, to recognize parameters that sequences share."""
    return (
        id(params.stop),
        id(params.stop_regex),
        id(params.stop_token_ids),
        id(params.allowed_token_ids),
        id(params.logit_bias),
        id(params.bad_words),
        id(params.bad_words_token_ids),
        id(params.dry),
        id(params.structured_output),
    )


def _verify_without_text(params: SamplingParams) -> None:
    """Raise ParameterError for parameters that need a tokenizer, because the server runs without one."""
    texts = (
        ("stop", params.stop, "stop_token_ids"),
        ("stop_regex", params.stop_regex, "stop_token_ids"),
        ("bad_words", params.bad_words, "logit_bias"),
        ("dry_sequence_breakers", params.dry and params.dry.sequence_breakers, "[]"),
        (STRUCTURED_OUTPUTS, params.structured_output, "allowed_token_ids"),
    )
    for name, value, instead in texts:
        if value:
            raise ParameterError(name, f"needs a tokenizer, and {NO_TOKENIZER}; use {instead}")


def _verify_volume(params: SamplingParams, texts: _EncodedTexts, num_sequences: int) -> None:
    """Raise ParameterError if the lists are too large in total when every sequence has its own copy."""
    constraint = params.structured_output
    sizes = (
        ("stop_token_ids", len(params.stop_token_ids), MAX_TOTAL_ENTRIES, "entries"),
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_TOTAL_ENTRIES, "entries"),
        ("logit_bias", len(params.logit_bias or ()), MAX_TOTAL_ENTRIES, "entries"),
        ("bad_words", sum(map(len, texts.bad_words)), MAX_TOTAL_ENTRIES, "tokens"),
        (
            "dry_sequence_breakers",
            0 if texts.dry is None else len(texts.dry.breaker_token_ids) // 4,
            MAX_TOTAL_ENTRIES,
            "tokens",
        ),
        (
            STRUCTURED_OUTPUTS,
            0 if constraint is None else len(constraint.spec),
            MAX_TOTAL_SPEC_CHARACTERS,
            "characters",
        ),
    )
    for name, size, limit, unit in sizes:
        if size * num_sequences > limit:
            raise ParameterError(
                name,
                f"has {size} {unit} for each of {num_sequences} sequences, "
                f"{size * num_sequences} in total, but at most {limit} are allowed",
            )


def _encode_predictions(sequences: list[SequenceRequest]) -> dict[int, bytes]:
    """Return the encoded tokens of each prediction, by the identity of its array; no tokens for None."""
    encoded: dict[int, bytes] = {id(None): b""}
    total = 0
    for sequence in sequences:
        predicted = sequence.predicted_token_ids
        if predicted is not None:
            total += len(predicted)
            if id(predicted) not in encoded:
                encoded[id(predicted)] = int32_bytes(predicted)
    if total > MAX_TOTAL_ENTRIES:
        raise ParameterError(
            "prediction",
            f"has {total} tokens for {counted(len(sequences), 'sequence')} in total, but at most "
            f"{MAX_TOTAL_ENTRIES} are allowed",
        )
    return encoded


def _verify_images(sequences: list[SequenceRequest]) -> None:
    """Raise ParameterError if the encoder inputs of all sequences exceed `MAX_TOTAL_ENCODER_BYTES`."""
    size = sum(len(item.data) for sequence in sequences for item in sequence.encoder_inputs)
    if size > MAX_TOTAL_ENCODER_BYTES:
        raise ParameterError(
            "n" if len(sequences) > 1 else "messages",
            f"makes {size} bytes of images for {counted(len(sequences), 'sequence')}, but at most "
            f"{MAX_TOTAL_ENCODER_BYTES} are allowed; send fewer or smaller images",
        )


def _verify_num_logprobs(sequences: list[tuple[int, SamplingParams]], vocab_size: int) -> None:
    """Raise ParameterError if the prompt logprobs, which are kept until the end, have too many entries."""
    total = 0
    for num_tokens, params in sequences:
        if (wanted := params.prompt_logprobs) is not None:
            num_top = vocab_size if wanted == -1 else wanted
            total += num_tokens * (1 + num_top + len(params.prompt_logprob_token_ids))
    if total > MAX_TOTAL_PROMPT_LOGPROBS:
        raise ParameterError(
            "prompt_logprobs",
            f"needs {total} entries for all prompt tokens, but at most {MAX_TOTAL_PROMPT_LOGPROBS} are allowed; "
            "request fewer alternatives or send fewer tokens",
        )


class _Seeds:
    """Yields seeds that never repeat: a keyed hash of a counter. With `base` 0 the key is random."""

    def __init__(self, base: int) -> None:
        self._key = base.to_bytes(8, "little") if base else os.urandom(32)
        self._counter = 0

    def draw(self) -> int:
        self._counter += 1
        count = self._counter.to_bytes(8, "little")
        digest = hashlib.blake2b(count, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") & MAX_SEED


def with_constraint(request: EngineCoreRequest, constraint: StructuredOutput) -> EngineCoreRequest:
    """Return a request with another constraint on its text."""
    params = msgspec.structs.replace(request.sampling_params, structured_output=constraint)
    return msgspec.structs.replace(request, sampling_params=params)
