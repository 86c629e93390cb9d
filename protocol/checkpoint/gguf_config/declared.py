"""Declare the translation of an architecture: its names, the parts that it shares with others, and its differences."""

from collections.abc import Callable
from typing import Any, TypeAlias

from .fields import ModelFields, Translate
from .parts import expert_fields, layer_types

Rule: TypeAlias = Callable[[ModelFields], Any]
"""A function that reads the value of one config field from a file."""


def declared(
    model_type: str, architecture: str, *parts: Translate, **differences: Any
) -> Translate:
    """Return the translation of an architecture.

    Args:
        model_type: The family's name in configs.
        architecture: The name of the class in configs.
        parts: Translations of fields that other architectures have, too. Later ones replace fields of earlier ones.
        differences: Further fields, which replace those of `parts`: rules, or values that all files have.
    """

    def translate(fields: ModelFields) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for part in parts:
            config |= part(fields)
        names = {"model_type": model_type, "architectures": [architecture]}
        own = {name: x(fields) if callable(x) else x for name, x in differences.items()}
        return config | names | own

    return translate


def has(tensor: str) -> Rule:
    """Return the rule of a field that is true if the file has a tensor."""
    return lambda fields: fields.has_tensor(tensor)


def integer(key: str, default: int | None = None, minimum: int = 1) -> Rule:
    """Return the rule of a field that is an integer."""
    return lambda fields: fields.integer(key, default, minimum=minimum)


def optional_integer(key: str) -> Rule:
    """Return the rule of a field that is an integer, or None if it is absent or 0."""
    return lambda fields: fields.optional_integer(key)


def positive(key: str, default: float | None = None) -> Rule:
    """Return the rule of a field that is a positive number."""
    return lambda fields: fields.positive(key, default)


def boolean(key: str, default: bool) -> Rule:
    """Return the rule of a field that is true or false."""
    return lambda fields: fields.boolean(key, default)


def expert(name: str) -> Rule:
    """Return the rule of a field that has another name in most mixtures of experts, which is `name`."""
    return lambda fields: expert_fields(fields)[name]


def windows(default_period: int) -> Rule:
    """Return the rule of `layer_types` in which every `default_period`-th layer has no window, unless the file says."""
    return lambda fields: layer_types(fields, default_period)
