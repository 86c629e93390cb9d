"""The options of `engine serve`.

They are the fields of `SECTIONS` that are annotated with `option`. The flag, the environment variable, the key in a
configuration file, help and the reference page all derive from the annotation, the type and the default of the field.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, Final, Literal, TypeGuard, get_args, get_origin

import msgspec

from ...protocol.config import (
    CacheConfig,
    DeviceConfig,
    FrontendConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
    StoreConfig,
)
from ...protocol.config.option import OptionSpec
from ...protocol.errors import ConfigError
from ..model_source.options import ModelOptions
from .launch_options import LaunchOptions
from .option_values import (
    PARSERS,
    parse_boolean,
    parse_entry,
    parse_integer,
    parse_list,
    parse_number,
    parse_object,
)

SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "model": ModelOptions,
    "frontend": FrontendConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "device": DeviceConfig,
    "recovery": RecoveryConfig,
    "store": StoreConfig,
    "parallel": ParallelConfig,
    "launch": LaunchOptions,
}

_TITLES: Final = {
    "frontend": "server",
    "cache": "KV cache",
    "parallel": "parallelism",
    "launch": "configuration",
}
"""Section -> its heading in help, if that is not the section's name."""

_MEBI: Final = 1 << 20


class Option(msgspec.Struct, frozen=True):
    """One option, which sets one field of one configuration section.

    Attributes:
        type: The type of the field, without None.
        low: The lowest value of a number.
        high: The highest value of a number.
    """

    section: str
    field: str
    type: Any
    default: object
    low: float | None
    high: float | None
    spec: OptionSpec

    @property
    def key(self) -> str:
        """The section and the field, such as `cache.block_size`."""
        return f"{self.section}.{self.field}"

    @property
    def flag(self) -> str:
        """The main flag, such as `--block-size`."""
        return self.spec.name or "--" + self.field.removesuffix("_s").replace("_", "-")

    @property
    def aliases(self) -> list[str]:
        """The other flags that set the same option."""
        return [*self.spec.aliases.split(), *self.spec.entries]

    @property
    def negative_flags(self) -> list[str]:
        """The flags that disable the option."""
        is_switch = self.type is bool and self.spec.value is None
        names = (self.flag, *self.aliases) if is_switch else ()
        return ["--no-" + name[2:] for name in names if name.startswith("--")]

    @property
    def variables(self) -> list[str]:
        """The environment variables that set the option, in order of precedence."""
        own = "ENGINE_" + self.flag[2:].replace("-", "_").upper()
        return [own, *self.spec.variable.split()]

    @property
    def group(self) -> str:
        """The heading of the option in help."""
        return self.spec.group or _TITLES.get(self.section, self.section)

    @property
    def is_list(self) -> bool:
        """True if the option takes several values."""
        return get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted values; empty if every value of the type is accepted."""
        item: Any = get_args(self.type)[0] if self.is_list else self.type
        if get_origin(item) is Literal:
            return get_args(item)
        return tuple(item) if _is_enum(item) else self.spec.choices

    @property
    def metavar(self) -> str:
        """The placeholder for a value in help, such as `N`."""
        if self.spec.metavar or self.choices:
            return self.spec.metavar or f"{{{','.join(self.choices)}}}"
        if self.spec.parse.endswith("file"):
            return "FILE"
        return {int: "N", float: "N", str: "TEXT"}.get(self.type, "JSON")

    @property
    def default_text(self) -> str:
        """The default as help shows it; empty if help shows none."""
        if self.spec.default_text or self.spec.value is not None:
            return self.spec.default_text
        on_cpu = "" if self.spec.on_cpu is None else f"; {self.spec.on_cpu} on a CPU"
        match self.default:
            case bool():
                return "on" if self.default else "off"
            case tuple():
                return " ".join(self.default)
            case float():
                return f"{self.default:g}"
            case int() if self.default >= _MEBI and self.default % _MEBI == 0:
                return f"{self.default // _MEBI}Mi"
            case str() | int():
                return f"{self.default}{on_cpu}"
        return ""

    def parse(self, text: str, name: str = "") -> Any:
        """Return a text as a value of the field. Raises ValueError, with the text and the limit, if it is invalid.

        `name` is the flag as it was given.
        """
        text = self.spec.synonyms.get(text, text)
        if (entry := self.spec.entries.get(name)) is not None:
            return parse_entry(entry, text, self.type)
        if text == self.spec.default_text == "auto":
            return self.default
        if self.spec.parse:
            return PARSERS[self.spec.parse](text)
        items = parse_list(text) if self.is_list else [text]
        for item in items:
            if self.choices and item not in self.choices:
                raise ValueError(f"must be one of {', '.join(self.choices)}, got {item!r}")
        if self.is_list:
            return tuple(items)
        if self.type is bool:
            return parse_boolean(text)
        if self.type is int:
            return parse_integer(text, self.low, self.high)
        if self.type is float:
            return parse_number(text, self.low, self.high)
        if get_origin(self.type) is dict:
            return parse_object(text, self.type)
        return self.type(text) if _is_enum(self.type) else text

    def store(self, given: dict[str, Any], name: str, value: object, where: str = "") -> None:
        """Parse a value and store it in `given` under the key of this option.

        Args:
            given: Key -> value. Values of a list option are appended to the list that is already there.
            name: The flag as it was given: the main flag, an alias, that of an entry, or a negative flag.
            value: A text, or a value of a YAML file.
            where: The source of the value in error messages, such as a file; if empty, the flag.
        """
        texts = list(_texts(value))
        try:
            if len(texts) > 1 and not self.is_list:
                raise ValueError(f"must be a single value, got {value}")
            for text in texts:
                if not _is_text(text):
                    raise ValueError("must be text in UTF-8")
                parsed = self.parse(text, name)
                if self.type is bool and name in self.negative_flags:
                    parsed = not parsed
                if self.spec.value is not None:
                    if not parsed:
                        continue
                    parsed = self.spec.value
                if self.is_list:
                    parsed = (*given.get(self.key, ()), *parsed)
                elif self.spec.entries:
                    parsed = given.get(self.key, {}) | parsed
                given[self.key] = parsed
        except ValueError as error:
            raise ConfigError(f"{where or name}: {error}") from None


def _is_text(value: str) -> bool:
    """Return False if a process could not decode the value when it read its environment."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_enum(type_: Any) -> TypeGuard[type[enum.StrEnum]]:
    return isinstance(type_, type) and issubclass(type_, enum.StrEnum)


def _texts(value: object) -> Iterator[str]:
    match value:
        case None:
            return
        case bool():
            yield str(value).lower()
        case list() | tuple():
            for item in value:
                yield from _texts(item)
        case dict():
            yield json.dumps(value)
        case _:
            yield str(value)


def _options() -> Iterator[Option]:
    for section, struct in SECTIONS.items():
        for field in msgspec.structs.fields(struct):
            default = {} if field.default is msgspec.NODEFAULT else field.default
            # A limit belongs to the number in `Annotated[int, …] | None`. Msgspec would also apply it to None
            # otherwise.
            annotated = _without_none(field.type)
            for meta in getattr(annotated, "__metadata__", ()):
                type_ = _without_none(annotated.__origin__)
                limits = annotated.__metadata__[0]
                spec = meta.extra["option"]
                yield Option(section, field.name, type_, default, limits.ge, limits.le, spec)


def _without_none(type_: Any) -> Any:
    parts = get_args(type_)
    return parts[0] if NoneType in parts else type_


OPTIONS: Final = list(_options())

FLAGS: Final = {
    name: option
    for option in OPTIONS
    for name in (option.flag, *option.aliases, *option.negative_flags)
}
"""Every flag, with its aliases and negative forms."""


def flag_of(key: str) -> str:
    """Return the main flag that sets `section.field`."""
    return next(option.flag for option in OPTIONS if option.key == key)


def cpu_defaults(section: str) -> dict[str, Any]:
    """Return the fields of a section whose default differs on a machine without a GPU."""
    return {
        option.field: option.spec.on_cpu
        for option in OPTIONS
        if option.section == section and option.spec.on_cpu is not None
    }
