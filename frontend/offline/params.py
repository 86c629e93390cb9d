"""The parameters of `LLM` that have vLLM's names."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec
import numpy as np

from ...protocol import sampling_params
from ...protocol.errors import ParameterError, counted
from ...protocol.sampling_params import ReturnedStates, StatesOf
from ..client.embeddings import LateChunkingParams
from ..client.groups.hidden_states import PARAM, states_in_file
from ..client.prompt_candidates import candidate_rows
from ..http.shown_values import echo
from ..tokenizer.token_ids import truncate
from .drop_in.constraints import StructuredOutputsParams

_WITHOUT_EFFECT: Final = (
    "flat_logprobs",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "stream_interval",
)
"""vLLM's arguments of SamplingParams that cannot change an output here."""

_ONLY_FALSE: Final = ("routed_experts_prompt_start", "trace_decode_token_ids", "watermarking")
"""vLLM's arguments of SamplingParams for features that Engine lacks. Programs may still pass their false values."""


class RequestOutputKind(enum.Enum):
    """The part of an output that each result of a stream has: all so far, what is new, or only the last result."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class _NamesOfVllm(type(msgspec.Struct)):  # type: ignore[misc]
    """The type of `SamplingParams`, which accepts vLLM's names of arguments."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        for name in _WITHOUT_EFFECT:
            given.pop(name, None)
        for name in _ONLY_FALSE:
            if value := given.pop(name, None):
                raise ParameterError(name, f"must be false or omitted, got {echo(value)}")
        if states := given.pop("return_hidden_states", None):
            given["returned_states"] = ReturnedStates(
                StatesOf.LAST if states == "last" else StatesOf.ALL
            )
        for name, value in (given.pop("extra_args", None) or {}).items():
            if name != PARAM:
                raise ParameterError(f"extra_args.{name}", f"is not supported; use {PARAM}")
            given["returned_states"] = states_in_file(value)
        if "structured_outputs" in given:
            given["structured_output"] = given.pop("structured_outputs")
        if isinstance(constraint := given.get("structured_output"), StructuredOutputsParams):
            given["structured_output"] = constraint.constraint
        start = given.pop("prompt_logprob_start", None) or 0
        listed = given.get("prompt_logprob_token_ids")
        if listed is not None and len(listed) and np.ndim(listed[0]):
            rows = [
                np.asarray(row, np.int32).tolist() for row in given.pop("prompt_logprob_token_ids")
            ]
            given["prompt_candidates"] = candidate_rows(rows, start)
            given["prompt_logprobs"] = given.get("prompt_logprobs") or 0
        return super().__call__(*args, **given)


class SamplingParams(sampling_params.SamplingParams, metaclass=_NamesOfVllm, gc=False):
    """Sampling parameters of `LLM`: those of the engine, of which some may also have vLLM's names.

    `structured_outputs` is `structured_output`. `flat_logprobs`, `output_text_buffer_length`, `skip_clone`,
    `skip_reading_prefix_cache`, `spaces_between_special_tokens` and `stream_interval` have no effect. `extra_args` may
    have `kv_transfer_params` about files of hidden states. `return_hidden_states`, SGLang's name, is True or "last".

    `prompt_logprob_token_ids` may have a list of token IDs for each token of the prompt from the index
    `prompt_logprob_start` + 1 on. `prompt_token_id_logprobs` of the output are their log-probabilities.

    Attributes:
        thinking_token_budget: The maximum number of reasoning tokens; None or -1 for no limit. The model's format of
            reasoning must be known (`reasoning_parser`).
        output_kind: The part of the output that each result of `AsyncLLM.generate` has.
    """

    thinking_token_budget: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters, of which those that are None have their defaults."""
        known = {name: value for name, value in given.items() if value is not None}
        if biases := known.get("logit_bias"):
            known["logit_bias"] = {int(token): value for token, value in biases.items()}
        return cls(**known)

    def clone(self) -> Self:
        """Return a copy."""
        return msgspec.structs.replace(self)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a result that is not generated, as in vLLM.

    Attributes:
        task: "embed", "token_embed", "classify" or "token_classify"; None for that of the method.
        dimensions: The number of leading elements of a vector to keep; None for all.
        use_activation: False returns vectors that are not normalized, and scores instead of probabilities; None for the
            model's own choice.
        normalize: An older name of `use_activation` for vectors.
        skip_reading_prefix_cache: Without effect, because results do not depend on the cache.
        late_chunking_params: Chunks of the text that have a vector each, for the task "token_embed".
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    late_chunking_params: LateChunkingParams | None = None

    @property
    def activates(self) -> bool | None:
        """True if vectors are normalized and scores become probabilities; None for the model's own choice."""
        return self.normalize if self.use_activation is None else self.use_activation


def each_params(
    given: PoolingParams | Sequence[PoolingParams] | None, tasks: Sequence[str], number: int
) -> list[PoolingParams]:
    """Return the parameters of each of `number` prompts.

    Raises:
        ParameterError: There are more or fewer parameters than prompts, or the task is not one of `tasks`.
    """
    if given is None or isinstance(given, PoolingParams):
        given = [given or PoolingParams()] * number
    if len(given) != number:
        raise ParameterError(
            "pooling_params", f"has {counted(len(given), 'value')} for {counted(number, 'prompt')}"
        )
    for each in given:
        if each.task is not None and each.task not in tasks:
            raise ParameterError(
                "pooling_params",
                f"must have the task {' or '.join(tasks) or 'None'}, got {echo(each.task)}",
            )
    return list(given)


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The choices of vLLM's `tokenization_kwargs`: special tokens, and the length to which a prompt is cut.

    `keep` is the number of tokens that are kept; None for all. The others are cut off at the end `side`: "left" or
    "right".
    """

    add_special_tokens: bool = True
    keep: int | None = None
    side: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, limit: int) -> Self:
        """Return the choices, of which -1 tokens stand for `limit`.

        Args:
            given: The names of vLLM (`truncate_prompt_tokens`, `truncation_side`, `add_special_tokens`) and of
                transformers (`truncation`, `max_length`). `padding` has no effect, because prompts are not padded.
            limit: The context in tokens.

        Raises:
            ParameterError: A name is unknown, or a value is invalid.
        """
        rest = dict(given or {})
        add = rest.pop("add_special_tokens", True)
        side = rest.pop("truncation_side", None)
        rest.pop("padding", None)
        most = rest.pop("max_length", None)
        if not rest.pop("truncation", False):
            most = None
        keep = rest.pop("truncate_prompt_tokens", most)
        name = "tokenization_kwargs"
        if rest:
            raise ParameterError(name, f"has the unknown name {echo(next(iter(rest)))}")
        if side not in (None, "left", "right"):
            raise ParameterError(
                f"{name}.truncation_side", f'must be "left" or "right", got {echo(side)}'
            )
        if keep is not None and (
            not isinstance(keep, int) or not (keep == -1 or 0 < keep <= limit)
        ):
            raise ParameterError(
                f"{name}.truncate_prompt_tokens",
                f"must be -1 or between 1 and {limit}, got {echo(keep)}",
            )
        return cls(bool(add), limit if keep == -1 else keep, side)

    def cut(self, token_ids: Sequence[int], bare: Sequence[int], side: str) -> list[int]:
        """Return the tokens that are kept, with the special tokens around those of the text, `bare`.

        `side` is the side to cut if the choices have none.
        """
        if self.keep is None or len(token_ids) <= self.keep:
            return list(token_ids)
        arrays = np.array(token_ids, np.int32), np.array(bare, np.int32)
        kept: list[int] = truncate(*arrays, self.keep, self.side or side).tolist()
        return kept
