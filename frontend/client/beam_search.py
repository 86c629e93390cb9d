"""Beam search: find the most probable continuations of a prompt.

Each step sends one request for one token per beam. The prefix cache finds the blocks that beams share with each other
and with their previous step. They have the same images, audio clips or sources, which are encoded once.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
import numpy as np

from ...protocol.arrays import Int32Array
from ...protocol.config import EngineConfig
from ...protocol.errors import EngineError, ParameterError
from ...protocol.messages import FinishReason
from ...protocol.sampling_params import SamplingParams
from .engine_client import EngineClient
from .request_group import RequestGroup
from .request_group import Sequence as GroupSequence
from .sequence_io import Delta, SequenceRequest

MAX_BEAM_WIDTH: Final = 32
"""Maximum number of beams. All their extensions are compared on the event loop."""

MAX_LENGTH_PENALTY: Final = 10
"""Maximum magnitude of `length_penalty`, so that powers of lengths stay finite."""

_EXPECTED: Final = ("stop", "length")


class BeamSearchParams(msgspec.Struct, frozen=True):
    """The parameters of a search.

    Attributes:
        beam_width: The number of beams, and of results.
        max_tokens: The maximum length of a result, in tokens.
        ignore_eos: True if beams continue after the end-of-sequence token.
        length_penalty: Beams are compared by the sum of their log-probabilities / length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def verify(self, config: EngineConfig) -> None:
        """Raise ParameterError for an invalid parameter."""
        max_logprobs = config.frontend.max_logprobs
        if config.model.diffusion is not None:
            raise ParameterError(
                "use_beam_search",
                "is not supported by block-diffusion models, which choose the tokens of a block in any order",
            )
        most = max_logprobs // 2 if max_logprobs >= 0 else MAX_BEAM_WIDTH
        if not 1 <= self.beam_width <= min(most, MAX_BEAM_WIDTH):
            raise ParameterError(
                "beam_width",
                f"must be between 1 and {min(most, MAX_BEAM_WIDTH)}, got {self.beam_width}; "
                "the limit is half of --max-logprobs",
            )
        if self.max_tokens < 1:
            raise ParameterError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise ParameterError(
                "length_penalty",
                f"must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}, got {self.length_penalty}",
            )


class _Beam(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprob: float
    has_ended: bool = False

    def score(self, length_penalty: float) -> float:
        return self.logprob / float(len(self.token_ids) ** length_penalty)


class BeamSearchFailed(EngineError):
    """Raised if a request of a step ended without a token; `output` describes its end."""

    def __init__(self, output: Delta) -> None:
        super().__init__(output.error or f"the request failed: {output.finish_reason}")
        self.output = output


class BeamSearch:
    """Beam searches for the prompts of one request.

    Args:
        engine: The engine client.
        params: The parameters.
        end_token_ids: The tokens that end a beam, unless `ignore_eos` is set.
        request_id: The identifier of the request in logs.

    Attributes:
        logprobs: The sum of the log-probabilities of each result; empty until `run` returns.
    """

    logprobs: list[float]

    def __init__(
        self,
        engine: EngineClient,
        params: BeamSearchParams,
        end_token_ids: Collection[int],
        request_id: str,
    ) -> None:
        self._engine = engine
        self._params = params
        self._end_token_ids = frozenset(() if params.ignore_eos else end_token_ids)
        self._request_id = request_id
        self._steps: set[RequestGroup] = set()
        self._is_aborted = False

    async def run(self, prompts: list[SequenceRequest]) -> RequestGroup:
        """Return a finished group with the results for each prompt, the best first.

        Each result has the sampling parameters of its prompt.

        Raises:
            BeamSearchFailed: A request of a step failed.
            ParameterError: A prompt or parameter is invalid.
        """
        searches = [asyncio.ensure_future(self._search(prompt)) for prompt in prompts]
        try:
            found = await asyncio.gather(*searches)
        finally:
            self.abort()
            for search in searches:
                search.cancel()
        self.logprobs = [beam.logprob for _, beams in found for beam in beams]
        sequences = [
            self._engine.groups.finished_sequence(
                prompt,
                first,
                array("i", beam.token_ids),
                FinishReason.STOP if beam.has_ended else FinishReason.LENGTH,
            )
            for prompt, (first, beams) in zip(prompts, found, strict=True)
            for beam in beams
        ]
        counts = [len(beams) for _, beams in found]
        return self._engine.groups.finished_group(self._request_id, sequences, counts)

    def abort(self) -> None:
        """End the searches. This has no effect after they have ended."""
        self._is_aborted = True
        for group in list(self._steps):
            group.abort()

    def leave(self) -> None:
        """End the searches, because the client has disconnected."""
        self.abort()

    async def _search(self, wanted: SequenceRequest) -> tuple[GroupSequence, list[_Beam]]:
        """Search for the continuations of one prompt.

        Return the sequence of the first step, and the results, best first.
        """
        params, width = self._params, self._params.beam_width
        prompt = np.asarray(wanted.prompt_token_ids, np.int32)
        beams, ended = [_Beam((), 0.0)], list[_Beam]()
        first: GroupSequence | None = None
        for _ in range(params.max_tokens):
            group = await self._step(wanted, prompt, beams)
            first = first or group.sequences[0]
            candidates = self._extend(beams, group, wanted.params.bad_words_token_ids)
            # A candidate with an end token counts as an end only if it is among the best beams.
            ended += [beam for beam in candidates[:width] if beam.has_ended]
            ended = self._best(ended)
            beams = [beam for beam in candidates if not beam.has_ended][:width]
            if not beams or (len(ended) == width and self._is_settled(beams, ended)):
                break
        assert first is not None
        return first, self._best(ended + beams)

    async def _step(
        self, wanted: SequenceRequest, prompt: Int32Array, beams: list[_Beam]
    ) -> RequestGroup:
        """Return the finished requests for the next token of each beam."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * self._params.beam_width, detokenize=False
        )
        requests = [
            msgspec.structs.replace(
                wanted,
                prompt_token_ids=np.concatenate((prompt, np.array(beam.token_ids, np.int32))),
                params=params,
            )
            for beam in beams
        ]
        group = await self._engine.submit(requests, request_id=self._request_id)
        self._steps.add(group)
        try:
            if self._is_aborted:
                group.abort()
            await group.wait_for_end()
        finally:
            self._steps.discard(group)
            group.abort()
        return group

    def _extend(
        self, beams: list[_Beam], group: RequestGroup, bad_words: Sequence[tuple[int, ...]]
    ) -> list[_Beam]:
        """Return the best beams with one more token: twice the requested number, because some may end.

        None ends with one of the `bad_words`.
        """
        extensions = []
        for beam, output in zip(beams, group.read_all(), strict=True):
            if output.finish_reason not in _EXPECTED:
                raise BeamSearchFailed(output)
            (position,) = output.logprobs or ()
            extensions += [
                (beam.logprob + logprob, beam, token_id)
                for token_id, logprob in position.top
                if not any((*beam.token_ids, token_id)[-len(word) :] == word for word in bad_words)
            ]
        extensions.sort(key=lambda extension: extension[0], reverse=True)
        return [
            _Beam((*beam.token_ids, token_id), logprob, token_id in self._end_token_ids)
            for logprob, beam, token_id in extensions[: 2 * self._params.beam_width]
        ]

    def _best(self, beams: list[_Beam]) -> list[_Beam]:
        penalty = self._params.length_penalty
        ranked = sorted(beams, key=lambda beam: beam.score(penalty), reverse=True)
        return ranked[: self._params.beam_width]

    def _is_settled(self, beams: list[_Beam], ended: list[_Beam]) -> bool:
        """Return whether no unfinished beam can become better than the worst finished one.

        Log-probabilities are negative. So the best possible score of a beam assumes that all further tokens are
        certain: the maximum number of tokens if the length penalty is positive, otherwise one.
        """
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else len(beams[0].token_ids) + 1
        return ended[-1].score(penalty) >= beams[0].logprob / float(length**penalty)
