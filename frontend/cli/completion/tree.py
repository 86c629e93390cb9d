"""The tree of all commands and flags of `engine`, read from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..commands import COMMANDS
from ..options import FLAGS

_PACKAGE = "engine.frontend.cli"


@dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
        names: All spellings that help shows.
        help: One line.
        has_value: True if the flag takes a value.
        choices: The valid values; empty if there are others.
    """

    names: tuple[str, ...]
    help: str
    has_value: bool
    choices: tuple[str, ...] = ()


@dataclass
class Node:
    """A command of `engine`, or a subcommand.

    Attributes:
        words: The words that call it, without `engine`.
        help: One line.
        flags: Its flags.
        children: Its subcommands.
        words_of_arguments: The valid values of its positional argument; empty if there are others.
    """

    words: tuple[str, ...]
    help: str
    flags: list[Flag] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    words_of_arguments: tuple[str, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_commands() -> Node:
    """Return the tree of all commands. This imports their modules."""
    root = Node((), "")
    root.flags = [
        Flag(("-h", "--help"), "show help", False),
        Flag(("--version",), "version", False),
    ]
    serve_flags = _read_parser(_parser_of("serve"), (), "").flags
    for name, command in COMMANDS.items():
        node = _read_parser(_parser_of(name), (name,), command.summary)
        if command.takes_serve_flags:
            for each in node.walk():
                if not each.children:
                    each.flags = _with_serve_flags(each.flags, serve_flags)
        root.children.append(node)
    return root


def _parser_of(name: str) -> argparse.ArgumentParser:
    module = import_module(COMMANDS[name].module, _PACKAGE)
    parser: argparse.ArgumentParser = module.make_parser()
    return parser


def _with_serve_flags(own: list[Flag], serve: list[Flag]) -> list[Flag]:
    known = {name for flag in own for name in flag.names}
    return [*own, *(flag for flag in serve if not known & set(flag.names))]


def _read_parser(parser: argparse.ArgumentParser, words: tuple[str, ...], summary: str) -> Node:
    node = Node(words, summary)
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list them.
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for name, child in action.choices.items():
                node.children.append(_read_parser(child, (*words, name), helps.get(name, "")))
        elif action.option_strings:
            node.flags.append(_read_flag(action))
        elif action.choices is not None:
            node.words_of_arguments = tuple(map(str, action.choices))
    return node


def _read_flag(action: argparse.Action) -> Flag:
    names = tuple(action.option_strings)
    choices: tuple[Any, ...] = tuple(action.choices or ())
    if not choices and names[-1] in FLAGS and "." in action.dest:
        choices = tuple(FLAGS[names[-1]].choices or ())
    summary = (action.help or "").partition(" (default")[0].replace("%%", "%")
    return Flag(names, summary, action.nargs != 0, tuple(map(str, choices)))
