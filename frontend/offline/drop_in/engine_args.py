"""The options of an engine as one object, and a parser of command lines that sets them, as in vLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Any, Final, Self, TypeVar

from ...cli.options import FLAGS
from ...cli.peer_flags.command_line import OTHER_FLAGS

P = TypeVar("P", bound=argparse.ArgumentParser)

_NAMES: Final = dict.fromkeys(
    flag[2:].replace("-", "_")
    for flag in ("--model", *FLAGS, *sorted(OTHER_FLAGS))
    if flag.startswith("--") and not flag.startswith("--no-") and "." not in flag
)
"""The names of all options, as keyword arguments of `LLM`."""


class Options:
    """The options of an engine. Those that are None have their defaults."""

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Return the parser, which now accepts the flag of every option."""
        for name in _NAMES:
            flag = f"--{name.replace('_', '-')}"
            option = FLAGS.get(flag)
            takes_value = option is not None and option.type is not bool
            more: dict[str, Any] = {} if takes_value else {"nargs": "?", "const": True}
            parser.add_argument(flag, dest=name, default=None, help=argparse.SUPPRESS, **more)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the options that a parser with these flags has read."""
        given = vars(args)
        return cls(**{name: given[name] for name in _NAMES if name in given})

    def keywords(self) -> dict[str, Any]:
        """Return the options that are not None, as keyword arguments of `LLM`."""
        return {name: value for name, value in vars(self).items() if value is not None}


EngineArgs: Final[type[Options]] = make_dataclass(
    "EngineArgs", [(name, Any, field(default=None)) for name in _NAMES], bases=(Options,)
)
"""The keyword arguments of `LLM` as fields of a data class, for `LLM.from_engine_args`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that also accepts underscores in the names of flags. Flags that are added later replace earlier ones."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"conflict_handler": "resolve"} | arguments)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments, with dashes in place of underscores in the names of flags."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([*map(_with_dashes, given)], namespace)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
