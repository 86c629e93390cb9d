"""The parts of a response that completions and chat completions share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from ..client.engine_client import Delta, Sequence
from ..http.json_pieces import EncodedJSON, encode_list
from .generation import PreparedPrompt
from .logprobs import Json, LogprobsRenderer
from .receipts.meta_info import cached_tokens_details
from .receipts.receipt import ReceiptSource, make_receipt
from .receipts.timings import llama_timings, vllm_metrics
from .schema import CompletionRequest, GenerationRequest
from .serving import Serving
from .streaming.event_stream import ChunkEncoder

Request = TypeVar("Request", bound=GenerationRequest)


class Outputs(Protocol):
    """The sequences of one response: all sequences of a request, or those of one of its prompts."""

    sequences: list[Sequence]

    def outputs_by_prompt(self) -> Iterator[list[Sequence]]:
        """Yield the sequences of each prompt, in the order of the prompts."""


class Answer(ABC, Generic[Request]):
    """A response that is sent as a whole or as stream chunks.

    `envelope` holds all fields except choices and usage. If `shows_abort`, clients expect the output and the finish
    reason of an aborted request; otherwise it gets an error.
    """

    shows_abort: ClassVar[bool] = False

    def __init__(self, serving: Serving, request: Request, group: Outputs, envelope: Json) -> None:
        self.serving = serving
        self.request = request
        self.envelope = envelope
        self.renderer = LogprobsRenderer(
            serving.tokenizer,
            serving.config.frontend.return_tokens_as_token_ids
            if request.return_tokens_as_token_ids is None
            else request.return_tokens_as_token_ids,
        )
        self._group = group
        self.receipt_source: ReceiptSource | None = None

    def sequence_at(self, position: int) -> Sequence:
        """Return the sequence at a position."""
        return self._group.sequences[position]

    @property
    def num_sequences(self) -> int:
        """The number of generated sequences, including `best_of` candidates that are not shown."""
        return len(self._group.sequences)

    @property
    def shows_prompt(self) -> bool:
        """True if every choice shows the tokens or the text of its prompt."""
        return bool(self.request.return_token_ids)

    @property
    def prompt_weight(self) -> int:
        """The number of prompt tokens that the complete response shows."""
        return self.shows_prompt * sum(s.num_prompt_tokens for s in self._group.sequences)

    @abstractmethod
    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""

    def headers(self) -> dict[str, str]:
        """Return the headers of the complete response besides those of every response."""
        return {}

    def chunks(self) -> ChunkEncoder:
        """Return the encoder that writes the response as stream chunks. Responses that are never streamed have none."""
        raise NotImplementedError

    def render_choices(
        self, outputs: list[Delta], render: Callable[[int, int], Json]
    ) -> list[Json] | EncodedJSON:
        """Return the choices of a complete response.

        Several choices are encoded one by one, because together they may be large.

        `render` gets the index of a choice and the position of its output.
        """
        positions = self.best_positions(outputs)
        choices = (render(index, position) for index, position in enumerate(positions))
        return list(choices) if len(positions) == 1 else encode_list(choices, at_once=1)

    def best_positions(self, outputs: list[Delta]) -> range | list[int]:
        """Return the positions of the outputs to show: the most probable `best_of` candidates, or all outputs."""
        num_shown = self.request.num_outputs
        return find_likeliest(outputs, self.request.best_of or num_shown, num_shown)

    def usage(self) -> Json:
        """Return the final usage."""
        return self.usage_so_far() | self.receipt()

    def transfer(self) -> Json:
        """Return `kv_transfer_params` for the engine that continues the request; {} if no blocks are held for it."""
        params = self._group.sequences[0].kv_transfer_params
        return {} if params is None else {"kv_transfer_params": params}

    def timing(self) -> Json:
        """Return the times of an answer with one output, if the server or the request asks for them; else {}."""
        if self.num_sequences > 1:
            return {}
        [sequence] = self._group.sequences
        found: Json = {}
        if self.serving.config.frontend.enable_per_request_metrics:
            found["metrics"] = vllm_metrics(sequence)
        if self.request.timings_per_token:
            found["timings"] = llama_timings(sequence, sequence.num_read_tokens)
        return found

    def extension(self) -> Json:
        """Return SGLang's `sglext` with the details that the request asks for; else {}."""
        if not self.request.return_cached_tokens_details:
            return {}
        details = cached_tokens_details(self._group.sequences[0])
        return {"sglext": {"cached_tokens_details": details}}

    def receipt(self) -> Json:
        """Return the usage field `engine` with the receipt; {} unless the request asks for it."""
        if self.receipt_source is None:
            return {}
        messages = getattr(self.request, "messages", None) or []
        if messages and isinstance(messages[0], list):
            # With several conversations, the receipt is about the first one.
            messages = messages[0]
        tokenizer, sequences = self.serving.tokenizer, self._group.sequences
        shown = self.serving.stable_prefix.apply(messages)
        return {"engine": make_receipt(self.receipt_source, sequences, tokenizer, shown)}

    def usage_so_far(self) -> Json:
        """Return the usage of the tokens read so far. This is slow for many sequences."""
        return self._count_usage()

    def first_positions(self) -> set[int]:
        """Return the position of the first sequence of each prompt."""
        return {outputs[0].position for outputs in self._group.outputs_by_prompt()}

    def add_to_usage(self, usage: Json, num_tokens: int) -> None:
        """Add newly generated tokens to a usage that `usage_so_far` returned."""
        usage["completion_tokens"] += num_tokens
        usage["total_tokens"] += num_tokens

    def add_cached_tokens(self, usage: Json, num_tokens: int) -> None:
        """Add the cached tokens of a prompt to a usage that `usage_so_far` returned."""
        if (details := usage.get("prompt_tokens_details")) is not None:
            details["cached_tokens"] += num_tokens

    def _count_usage(
        self,
        *,
        num_completion_tokens: int | None = None,
        reasoning_tokens: int | None = None,
        predicts: bool = False,
    ) -> Json:
        """Return the usage; the tokens of a prompt count once, however many outputs it has.

        Args:
            num_completion_tokens: The number of generated tokens; None for all that were read.
            reasoning_tokens: The number of reasoning tokens; None if reasoning is not separated from content.
            predicts: True to report accepted and rejected tokens of the client's prediction.
        """
        prompts = [outputs[0] for outputs in self._group.outputs_by_prompt()]
        num_prompt = sum(s.num_prompt_tokens for s in prompts)
        if num_completion_tokens is None:
            num_completion_tokens = sum(s.num_read_tokens for s in self._group.sequences)
        counts: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt + num_completion_tokens,
        }
        if self.serving.config.frontend.enable_prompt_tokens_details:
            cached = sum(s.num_cached_tokens for s in prompts)
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
        details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
        if predicts:
            sequences = self._group.sequences
            accepted = sum(s.num_accepted_predictions for s in sequences)
            # Accepted tokens after a stop string are not part of the answer.
            details["accepted_prediction_tokens"] = min(accepted, num_completion_tokens)
            details["rejected_prediction_tokens"] = sum(
                s.num_rejected_predictions for s in sequences
            )
        if details:
            counts["completion_tokens_details"] = details
        if reasoning_tokens is not None:
            counts["reasoning_tokens"] = reasoning_tokens  # SGLang's place
        return counts


class PromptAnswer(Answer[CompletionRequest]):
    """The answer to prompts that are texts or tokens, in the order of the request."""

    def __init__(
        self,
        serving: Serving,
        request: CompletionRequest,
        prompts: list[PreparedPrompt],
        group: Outputs,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        self._prompts = prompts

    def prompt_of(self, sequence: Sequence) -> PreparedPrompt:
        """Return the prompt of a sequence."""
        return self._prompts[sequence.position // self._prompts[0].params.n]


def find_likeliest(outputs: list[Delta], num_candidates: int, num_shown: int) -> range | list[int]:
    """Return the positions of the outputs with the largest mean logprobs.

    `num_shown` outputs are selected among the `num_candidates` of each prompt.
    """
    if num_candidates == num_shown:
        return range(len(outputs))
    mean_logprobs = [_mean_logprob(output) for output in outputs]
    positions: list[int] = []
    for start in range(0, len(outputs), num_candidates):
        candidates = range(start, start + num_candidates)
        ranked = sorted(candidates, key=mean_logprobs.__getitem__, reverse=True)
        positions += ranked[:num_shown]
    return positions


def _mean_logprob(output: Delta) -> float:
    logprobs = [position.logprob for position in output.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
