"""Converts the fields of a request to `SamplingParams`."""

from __future__ import annotations

from typing import Any, TypeVar

from ...protocol.sampling_params import MAX_LOGIT_BIASES, MAX_N, SamplingParams
from ..http.errors import bad_request, echo, wrong
from .schema import UNLIMITED, GenerationRequest
from .structured.constraint import Constraint

V = TypeVar("V")

_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
_PLAIN = (
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "repetition_detection",
)


def sampling_params(
    request: GenerationRequest,
    *,
    defaults: dict[str, float | int],
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
) -> SamplingParams:
    """Return the sampling parameters of a request, not yet verified.

    Each value comes from the request, else from the server's `defaults`, else from the API's defaults.

    Raises:
        APIError: `best_of` or `logit_bias` is invalid (400).
    """
    given: dict[str, Any] = {name: defaults[name] for name in _DEFAULTABLE if name in defaults}
    for name in (*_DEFAULTABLE, *_PLAIN):
        value = getattr(request, name)
        if value is not None:
            given[name] = value
    top_k = given.get("top_k")
    if top_k is not None and top_k > vocab_size:
        given["top_k"] = vocab_size
    num_outputs = _num_candidates(request)
    if num_outputs > request.num_outputs and logprobs is None:
        # best_of ranks the candidates by the logprobs of their tokens.
        logprobs = 0
    if request.stream_interval is not None and request.stream_interval < 1:
        raise wrong("stream_interval", "at least 1", request.stream_interval)
    listed = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    if listed and logprobs is not None:
        # The listed tokens replace the most likely ones.
        logprobs = 0
    given_regex = request.stop_regex or ()
    expressions = (given_regex,) if isinstance(given_regex, str) else given_regex
    return SamplingParams(
        **given,
        n=num_outputs,
        max_tokens=None if max_tokens == UNLIMITED else max_tokens,
        logprobs=logprobs,
        logprob_token_ids=listed,
        reports_progress=bool(request.stream and request.return_progress),
        structured_output=None if constraint is None else constraint.structured_output,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_regex=tuple(expression for expression in expressions if expression),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        allowed_token_ids=optional_tuple(request.allowed_token_ids),
        logit_bias=_logit_bias(request.logit_bias),
    )


def _num_candidates(request: GenerationRequest) -> int:
    """Return the number of outputs to generate for each prompt."""
    n, best_of = request.num_outputs, request.best_of
    if best_of is None or n < 1:
        return n
    if not n <= best_of <= MAX_N:
        raise wrong("best_of", f"between n={n} and {MAX_N}", best_of)
    if best_of > n and request.stream:
        raise wrong("best_of", f"n={n} in a stream", best_of)
    return best_of


def optional_tuple(values: list[V] | None) -> tuple[V, ...] | None:
    """Return the values as a tuple; None for None."""
    return None if values is None else tuple(values)


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float] | None:
    """Return token id -> bias, not clamped yet. The JSON keys of OpenAI's API are token ids in strings."""
    if not biases:
        return None
    if len(biases) > MAX_LOGIT_BIASES:
        raise bad_request(
            "logit_bias",
            f"must have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}",
        )
    parsed = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request("logit_bias", f"keys must be token ids, got {echo(key)}")
        parsed[int(key)] = bias
    return parsed
