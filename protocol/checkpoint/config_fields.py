"""Read a checkpoint's JSON files by typed fields, with errors that name the file, the field and its value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import CheckpointError

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000
"""Upper bound of layer counts. Each layer needs memory, so a wrong number must not exhaust it."""
MAX_NUMBER = 1e15
"""Upper bound of all other numbers, so that values computed from them fit into a float32."""

T = TypeVar("T")


class ConfigFields:
    """The fields of one object in the JSON file `path`. Every error is a `CheckpointError`.

    Errors show a field's name after `prefix`. A field that is null counts as absent, as in transformers.
    """

    def __init__(
        self, config: Mapping[str, Any], path: str | PathLike[str], prefix: str = ""
    ) -> None:
        self.config = config
        self.path = path
        self.prefix = prefix

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        """Read a file that contains a JSON object."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(path, f"{error.strerror or error}; download it") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(path, f"not valid JSON ({error}); download it again") from error
        if not isinstance(content, dict):
            raise CheckpointError(path, "must contain a JSON object; download it again")
        return cls(content, path)

    @classmethod
    def read_if_present(cls, path: Path) -> ConfigFields:
        """Read a file, or return no fields if it does not exist."""
        return cls.read(path) if path.is_file() else cls({}, path)

    def with_values(self, values: Mapping[str, Any]) -> ConfigFields:
        """Return a copy of the fields with some values replaced."""
        return ConfigFields({**self.config, **values}, self.path, self.prefix)

    def with_defaults(self, **defaults: Any) -> ConfigFields:
        """Return a copy of the fields with defaults for names that the file does not contain at all."""
        return ConfigFields({**defaults, **self.config}, self.path, self.prefix)

    def error(self, problem: str) -> CheckpointError:
        """Return a CheckpointError about this file."""
        return CheckpointError(self.path, problem)

    def wrong(self, name: str, needed: str, value: Any) -> CheckpointError:
        """Return a CheckpointError that says what a field must be, and what it is."""
        return self.error(f"{self.prefix}{name} must be {needed}, got {value!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or the default if it is absent."""
        value = self.config.get(name)
        return default if value is None else value

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"{self.prefix}{name} is missing")
        return value

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
    ) -> int:
        """Return an integer field, checked to be from `minimum` to `maximum`."""
        value = self._required(name, default)
        if not _is_integer(value) or not minimum <= value <= maximum:
            needed = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
            if maximum < MAX_INTEGER:
                needed += f", at most {maximum}"
            raise self.wrong(name, needed, value)
        return int(value)

    def odd(self, name: str, default: int, *, maximum: int = MAX_INTEGER) -> int:
        """Return a positive integer field, checked to be odd."""
        value = self.integer(name, default, maximum=maximum)
        if value % 2 == 0:
            raise self.wrong(name, "odd", value)
        return value

    def multiple(
        self, name: str, factor: int, default: int | None = None, *, maximum: int = MAX_INTEGER
    ) -> int:
        """Return a positive integer field, checked to be a multiple of `factor`."""
        value = self.integer(name, default, maximum=maximum)
        if value % factor:
            needed = "an even number" if factor == 2 else f"a multiple of {factor}"
            raise self.wrong(name, needed, value)
        return value

    def convert(self, name: str, default: T, kind: Any, needed: str) -> T:
        """Return a field of the type `kind`, which is called `needed` in errors."""
        value = self.get(name, default)
        try:
            found: T = msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise self.wrong(name, needed, value) from None
        return found

    def layer_count(self, name: str) -> int:
        """Return a field with a number of layers, checked to be reasonable."""
        return self.integer(name, maximum=MAX_LAYERS)

    def optional_integer(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is absent."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of at least 0."""
        value = self._required(name, default)
        if not _is_number(value) or value < 0:
            raise self.wrong(name, "a number that is not negative", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number of at least 0, or None if the field is absent."""
        return None if self.get(name) is None else self.number(name)

    def positive(self, name: str, default: float | None = None, *, above: float = 0) -> float:
        """Return a number greater than `above`."""
        value = self._required(name, default)
        if not _is_number(value) or value <= above:
            needed = f"a number above {above:g}" if above else "a positive number"
            raise self.wrong(name, needed, value)
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        """Return a positive number, or None if the field is absent."""
        return None if self.get(name) is None else self.positive(name)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string field."""
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def require(self, name: str, needed: Any, reason: str = "", *, default: Any = None) -> None:
        """Check that a field has the only value that is supported.

        Args:
            name: The name of the field.
            needed: The only supported value.
            reason: The text after the value in the error.
            default: The value of an absent field; by default the supported value.

        Raises:
            CheckpointError: The field has another value.
        """
        found = self.get(name, needed if default is None else default)
        if found != needed or isinstance(found, bool) != isinstance(needed, bool):
            text = str(needed).lower() if isinstance(needed, bool) else repr(needed)
            raise self.wrong(name, f"{text}{reason}", found)

    def require_all(self, **needed: Any) -> None:
        """Check that each field has the only value that is supported, which is also that of an absent field.

        Raises:
            CheckpointError: A field has another value.
        """
        for name, value in needed.items():
            self.require(name, value)

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Return a string field, checked to be one of `choices`."""
        value = self.text(name, default)
        if value not in choices:
            raise self.wrong(name, " or ".join(map(repr, choices)), value)
        return value

    def divisor(self, name: str, number: int, default: int) -> int:
        """Return an integer field, checked to divide `number`."""
        value = self.integer(name, default)
        if number % value:
            raise self.wrong(name, f"a divisor of {number}", value)
        return value

    def square_side(self, name: str, default: int, *, maximum: int = MAX_INTEGER) -> int:
        """Return the root of an integer field, checked to be a square number."""
        value = self.integer(name, default, maximum=maximum)
        side = math.isqrt(value)
        if side**2 != value:
            raise self.wrong(name, "a square number", value)
        return side

    def texts(self, name: str) -> list[str]:
        """Return a list of strings; empty if the field is absent."""
        values = self.get(name, [])
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, str) for value in values
        ):
            raise self.wrong(name, "a list of strings", values)
        return list(values)

    def integers(self, name: str) -> list[int]:
        """Return a list of integers."""
        values = self._required(name, None)
        if not isinstance(values, list) or not all(map(_is_integer, values)):
            raise self.wrong(name, "a list of integers", values)
        return values

    def token_ids(self, name: str) -> list[int]:
        """Return one token id or a list of them as a list; empty if absent. They may exceed the vocabulary."""
        value = self.get(name, [])
        values = value if isinstance(value, list | tuple) else [value]
        if not all(_is_integer(value) for value in values):
            raise self.wrong(name, "the id of a token or a list of ids", value)
        return list(values)

    def positives(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` positive numbers."""
        values = self._required(name, None)
        if (
            not isinstance(values, list | tuple)
            or len(values) != length
            or not all(_is_number(value) and value > 0 for value in values)
        ):
            raise self.wrong(name, f"a list of {length} positive numbers", values)
        return tuple(float(value) for value in values)

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """Return a list with one entry per layer, or None if the field is absent."""
        values = self.get(name)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != num_layers:
            raise self.error(f"{self.prefix}{name} must have {num_layers} entries, got {values!r}")
        return list(values)

    def section(self, name: str) -> ConfigFields | None:
        """Return a nested object, or None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return ConfigFields(value, self.path, f"{self.prefix}{name}.")

    def section_or_empty(self, name: str) -> ConfigFields:
        """Return a nested object, or one without fields if it is absent."""
        return self.section(name) or ConfigFields({}, self.path, f"{self.prefix}{name}.")

    def required_section(self, name: str) -> ConfigFields:
        """Return a nested object, which must be present."""
        section = self.section(name)
        if section is None:
            raise self.error(f"{self.prefix}{name} is missing")
        return section

    def first_section(self, *names: str) -> ConfigFields:
        """Return the first of these nested objects that is not empty, or an empty one."""
        sections = (self.section(name) for name in names)
        return next(
            (found for found in sections if found and found.config), ConfigFields({}, self.path)
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    )
