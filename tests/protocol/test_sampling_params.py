from __future__ import annotations

import math

import pytest
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import RepetitionDetectionParams as Repetitions
from engine.protocol.sampling_params import SamplingParams

LIMITS = {"vocab_size": 100, "max_logprobs": 20}


def test_defaults_and_limits_are_accepted() -> None:
    SamplingParams().verify(**LIMITS)
    SamplingParams(
        max_tokens=1, temperature=0, top_p=1.0, top_k=-1, seed=-(2**63), logprobs=20, stop=("x",)
    ).verify(**LIMITS)
    SamplingParams(logprobs=-1).verify(vocab_size=100, max_logprobs=-1)


@pytest.mark.parametrize(
    ("params", "field", "limit"),
    [
        ({"temperature": "0.7"}, "temperature", "expected float, got str"),
        ({"max_tokens": True}, "max_tokens", "expected int | null, got bool"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "expected int, got str"),
        ({"top_k": 10**400}, "sampling_params", "ints"),
        ({"temperature": -0.1}, "temperature", "[0, 100]"),
        ({"temperature": math.nan}, "temperature", "[0, 100]"),
        ({"temperature": math.inf}, "temperature", "[0, 100]"),
        ({"top_p": -0.1}, "top_p", "[0, 1]"),
        ({"top_p": 1.01}, "top_p", "[0, 1]"),
        ({"typical_p": 0.0}, "typical_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"min_p": 2.0}, "min_p", "[0, 1]"),
        ({"presence_penalty": 3.0}, "presence_penalty", "[-2, 2]"),
        ({"frequency_penalty": -3.0}, "frequency_penalty", "[-2, 2]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "[0.01, 100]"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty", "[0.01, 100]"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "max_tokens=5"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"seed": 2**63}, "seed", str(2**63 - 1)),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"logprobs": -1}, "logprobs", "at most 20"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "at least 0"),
        ({"stop": ("",)}, "stop", "empty"),
        ({"stop": ("a",) * 65}, "stop", "at most 64"),
        ({"bad_words": ("a" * 16,) * 1024 + ("b",)}, "bad_words", "at most 1024 entries, got 1025"),
        ({"bad_words": ("a" * 16_385,)}, "bad_words", "at most 16384 characters, got 16385"),
        ({"stop_token_ids": (5,) * 1025}, "stop_token_ids", "at most 1024 entries, got 1025"),
        ({"allowed_token_ids": (5,) * 101}, "allowed_token_ids", "at most 100 entries, got 101"),
        ({"stop_token_ids": (100,)}, "stop_token_ids", "[0, 100)"),
        ({"allowed_token_ids": ()}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids", "[0, 100)"),
        ({"logit_bias": {100: 1.0}}, "logit_bias", "[0, 100)"),
        ({"logit_bias": {5: math.nan}}, "logit_bias", "[-100, 100]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias", "[-100, 100]"),
        ({"bad_words_token_ids": ((3, 100),)}, "bad_words", "[0, 100)"),
        (
            {"repetition_detection": Repetitions(1025, 1, 2)},
            "repetition_detection.max",
            "between 0 and 1024",
        ),
        (
            {"repetition_detection": Repetitions(4, 5, 2)},
            "repetition_detection.min_p",
            "0 and 4, got 5",
        ),
        (
            {"repetition_detection": Repetitions(4, 0, 1)},
            "repetition_detection.min_c",
            "at least 2, got 1",
        ),
    ],
)
def test_an_error_names_the_field_and_its_limit(params: dict, field: str, limit: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**params).verify(**LIMITS)
    assert caught.value.param.startswith(field)
    assert limit in str(caught.value)


def test_logprobs_are_limited_by_the_vocabulary_size() -> None:
    SamplingParams(logprobs=100).verify(vocab_size=100, max_logprobs=1000)
    with pytest.raises(ParameterError, match="at most 100"):
        SamplingParams(logprobs=101).verify(vocab_size=100, max_logprobs=1000)
