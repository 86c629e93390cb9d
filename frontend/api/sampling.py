"""Converts the fields of a request to `SamplingParams`."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from ...protocol.sampling_params import MAX_LOGIT_BIASES, MAX_N, SAMPLERS, DryParams, SamplingParams
from ..http.errors import bad_request, echo, wrong
from .inputs.hidden_states import returned_states
from .numbers import parse_number
from .schema import UNLIMITED, GenerationRequest
from .structured.constraint import Constraint

V = TypeVar("V")

_DEFAULTABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_PLAIN = (
    "min_tokens",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "repetition_detection",
)
_DRY: Final = {
    "dry_multiplier": "multiplier",
    "dry_base": "base",
    "dry_allowed_length": "allowed_length",
    "dry_penalty_last_n": "last_n",
    "dry_sequence_breakers": "sequence_breakers",
}
"""Field of a request -> field of `DryParams`."""

PENALTIES_OFF: Final = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_WITHOUT_SAMPLER: Final[dict[str, dict[str, float]]] = {
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""Sampler -> the parameters that leave it without effect."""

_SAMPLER_NAMES: Final = {
    "typical_p": "typ_p",
    "typical": "typ_p",
    "temp": "temperature",
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "typical-p": "typ_p",
    "typ-p": "typ_p",
    "top-n-sigma": "top_n_sigma",
    "nucleus": "top_p",
}
_SAMPLER_LETTERS: Final = {
    "d": "dry",
    "e": "penalties",
    "i": "infill",
    "k": "top_k",
    "m": "min_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "t": "temperature",
    "x": "xtc",
    "y": "typ_p",
}

INFILL_SAMPLER: Final = "infill"
INFILL_MIN_P: Final = 0.2
"""The `min_p` that stands for the sampler `infill`, which keeps tokens that are about as probable as this."""


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
    if given.get("top_n_sigma", 0) < 0:
        # llama.cpp uses -1 for none.
        given["top_n_sigma"] = 0.0
    if (dry := _dry(request)) is not None:
        given["dry"] = dry
    if request.samplers is not None:
        _choose_samplers(request.samplers, given)
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
        returned_states=returned_states(request),
    )


def _dry(request: GenerationRequest) -> DryParams | None:
    """Return the penalty for repetitions; None without a multiplier."""
    if not request.dry_multiplier:
        return None
    given: dict[str, Any] = {
        name: value
        for field, name in _DRY.items()
        if (value := getattr(request, field)) is not None
    }
    if "sequence_breakers" in given:
        given["sequence_breakers"] = tuple(given["sequence_breakers"])
    return DryParams(**given)


def _choose_samplers(samplers: str | list[str], given: dict[str, Any]) -> None:
    """Set the order of the samplers, and the parameters of those that are left out so that they have no effect.

    Penalties always come first. Unknown samplers are ignored, as llama.cpp does.
    """
    if isinstance(samplers, str):
        names = [_SAMPLER_LETTERS.get(letter, letter) for letter in samplers]
    else:
        names = [_SAMPLER_NAMES.get(name, name) for name in samplers]
    if INFILL_SAMPLER in names:
        given["min_p"] = max(given.get("min_p", 0.0), INFILL_MIN_P)
        names = ["min_p" if name == INFILL_SAMPLER else name for name in names]
    for name, neutral in _WITHOUT_SAMPLER.items():
        if name not in names:
            given |= neutral
    if "penalties" not in names:
        given |= PENALTIES_OFF
    if "dry" not in names:
        given.pop("dry", None)
    given["samplers"] = tuple(name for name in dict.fromkeys(names) if name in SAMPLERS)


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
        if (token_id := parse_number(key)) is None:
            raise bad_request("logit_bias", f"keys must be token ids, got {echo(key)}")
        parsed[token_id] = bias
    return parsed
