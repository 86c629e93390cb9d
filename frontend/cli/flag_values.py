"""Parsers for flag values.

Each takes the text after a flag and raises ArgumentTypeError with the value and the limit if it is invalid.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.config import KVEventsConfig, PrefixHash, SpeculativeConfig

_SIZE = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[kKmMgGtT])(?P<binary>i?)(?P<byte>B?))?"
)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"}
_KNOWN_DTYPES = ("auto", "float32", "float16", "bfloat16")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be an integer, got {text!r}") from None
        return _in_range(value, low, high)

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not math.isfinite(value):
            raise ArgumentTypeError(f"must be finite, got {text}")
        return _in_range(value, low, high)

    return parse


def dotted_name(text: str) -> str:
    """Return the dotted name of a class, such as `package.module.Class`."""
    if "." not in text or not all(map(str.isidentifier, text.split("."))):
        raise ArgumentTypeError(f"must be a dotted name such as package.module.Class, got {text!r}")
    return text


class PerReplica(float):
    """A number that is the total for all workers of a replica; the configuration field is per worker."""


def per_replica(text: str) -> PerReplica:
    return PerReplica(number(0)(text))


def size(low: int) -> Callable[[str], int]:
    """Return a parser for counts with an optional unit: 4k is 4000; 4K, 4Ki and 4KiB are 4096; 4KB is 4000."""

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ArgumentTypeError(f"must be a number such as 4096, 32k or 4GiB, got {text!r}")
        unit = match["unit"] or ""
        binary = bool(match["binary"]) or (unit.isupper() and not match["byte"])
        factor = (1024 if binary else 1000) ** _POWERS.get(unit.lower(), 0)
        value = float(match["number"]) * factor
        if value != int(value):
            raise ArgumentTypeError(f"must be a whole number, got {text!r}")
        return _in_range(int(value), low, None)

    return parse


def model_length(text: str) -> int:
    """Return the size, or -1 for `auto`."""
    return -1 if text in ("auto", "-1") else size(1)(text)


def dtype(text: str) -> str:
    name = _DTYPES.get(text, text)
    if name not in _KNOWN_DTYPES:
        raise ArgumentTypeError(f"must be one of {', '.join(_KNOWN_DTYPES)}, got {text!r}")
    return name


def prefix_hash(text: str) -> PrefixHash:
    """Return the hash algorithm; vLLM's name `xxhash` is accepted for xxh3."""
    known = {"xxhash": PrefixHash.XXH3, **{str(algorithm): algorithm for algorithm in PrefixHash}}
    if text not in known:
        raise ArgumentTypeError(f"must be one of {', '.join(PrefixHash)}, got {text!r}")
    return known[text]


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'must be a JSON object such as {{"name": 1}}, got {text}')
    return value


def kv_events(text: str) -> KVEventsConfig | None:
    """Return the KV-event settings, or None if publishing is disabled.

    vLLM's fields `publisher` and `enable_kv_cache_events` are accepted as well.
    """
    fields = json_object(text)
    if fields.pop("publisher", "zmq") != "zmq":
        raise ArgumentTypeError('publisher must be "zmq"; no other publisher is supported')
    if not fields.pop("enable_kv_cache_events", True):
        return None
    try:
        return msgspec.convert(fields, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ArgumentTypeError(str(error)) from None


def speculative(text: str) -> SpeculativeConfig | None:
    """Return the settings for speculative decoding, or None if they disable it.

    `prompt_lookup_max` is accepted and ignored, because the longest match is always used.
    """
    fields = json_object(text)
    fields.pop("prompt_lookup_max", None)
    # Checked first, so that the error names the method rather than one of its fields.
    if (method := fields.get("method", "ngram")) != "ngram" or "model" in fields:
        what = f"method {method!r}" if method != "ngram" else "a draft model"
        raise ArgumentTypeError(
            f"{what} is not supported; use method 'ngram' with num_speculative_tokens and prompt_lookup_min"
        )
    try:
        config = msgspec.convert(fields, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ArgumentTypeError(str(error)) from None
    for name, low in (("num_speculative_tokens", 0), ("prompt_lookup_min", 1)):
        try:
            _in_range(getattr(config, name), low, 64)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{name} {error}") from None
    return config if config.num_speculative_tokens else None


def text_or_json_list(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"must be a JSON list of strings: {error}") from None
    if not all(isinstance(item, str) for item in value):
        raise ArgumentTypeError(f"must be a JSON list of strings, got {text}")
    return list(value)


def existing_file(text: str) -> str:
    if not Path(text).is_file():
        raise ArgumentTypeError(f"must be the path of an existing file, got {text!r}")
    return text


def api_keys_in_file(text: str) -> list[str]:
    try:
        keys = Path(text).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"cannot read {text!r}: {error}") from None
    if not keys:
        raise ArgumentTypeError(f"{text!r} contains no API key; write one key per line")
    return keys


def _in_range(value: Any, low: float, high: float | None) -> Any:
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ArgumentTypeError(f"must be {limit}, got {value}")
    return value
