"""Typed access to a Hugging Face config dict, with errors that name the field and its value."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ...protocol.errors import CheckpointError


class ConfigFields:
    """One config dict of the checkpoint at `path`; every error is a `CheckpointError`.

    A field that is null counts as absent, as it does for transformers.
    """

    def __init__(self, config: Mapping[str, Any], path: str | PathLike[str]) -> None:
        self.config = config
        self.path = path

    def with_defaults(self, **defaults: Any) -> "ConfigFields":
        """The same fields, where those that are not mentioned at all have a default."""
        return ConfigFields({**defaults, **self.config}, self.path)

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.path, f"config: {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"{name} is missing")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._required(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{name} must be a positive integer, it is {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{name} must be a number, it is {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, it is {value!r}")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        values = self._required(name, None)
        if (
            not isinstance(values, list | tuple)
            or len(values) != length
            or not all(isinstance(value, int | float) for value in values)
        ):
            raise self.error(f"{name} must be a list of {length} numbers, it is {values!r}")
        return tuple(float(value) for value in values)

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """The list `name`, one entry a layer; None if absent."""
        values = self.get(name)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != num_layers:
            raise self.error(f"{name} must have {num_layers} entries, it is {values!r}")
        return list(values)

    def section(self, name: str) -> "ConfigFields | None":
        """The dict `name` inside this one; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, it is {value!r}")
        return ConfigFields(value, self.path)
