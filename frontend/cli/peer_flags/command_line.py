"""Remove the flags of other servers from a command line, or translate them to options of Engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ....protocol.errors import ConfigError
from .accepted import PEER_FLAGS, SWITCHES, WITH_LIST, WITH_VALUE, has_no_effect
from .instead import INSTEAD
from .translated import TRANSLATIONS, translate

OTHER_FLAGS: Final = frozenset().union(
    PEER_FLAGS, SWITCHES, WITH_LIST, WITH_VALUE, INSTEAD, TRANSLATIONS
)
"""All flags of other servers that are known and are no options of Engine."""

_REPOSITORY: Final = ("--hf-repo", "-hf", "-hfr")
_FILE: Final = ("--hf-file", "-hff")


def without_peer_flags(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a command line that are options of Engine, or that are unknown.

    Raises:
        ConfigError: A flag of another server has a value with another meaning than Engine's behavior, or needs another
            command line.
    """
    argv = _with_file_of_repository(argv)
    for argument in argv:
        flag = _normalized(argument.partition("=")[0])
        if flag in TRANSLATIONS:
            yield from TRANSLATIONS[flag].defaults
    index = 0
    while index < len(argv):
        argument = argv[index]
        index += 1
        name, equals, value = argument.partition("=")
        flag, dot, _ = _normalized(name).partition(".")
        if flag in PEER_FLAGS or flag in TRANSLATIONS:
            takes_value = (
                TRANSLATIONS[flag].takes_value if flag in TRANSLATIONS else PEER_FLAGS[flag]
            )
            if takes_value and not equals:
                value = _value_at(argv, index, flag)
                index += 1
            if flag in TRANSLATIONS:
                yield from translate(flag, value)
            elif takes_value:
                check_value(flag, value)
        elif has_no_effect(flag):
            if flag in WITH_LIST:
                while not equals and index < len(argv) and not argv[index].startswith("-"):
                    index += 1
            elif not equals and not _is_switch(flag):
                _value_at(argv, index, flag)
                index += 1
        elif flag in INSTEAD and not dot:
            raise not_here(flag)
        else:
            yield argument


def peer_arguments(name: str, value: object, where: str = "") -> list[str] | None:
    """Return Engine's arguments for an entry of a configuration file; None if it is not a flag of another server.

    Args:
        name: The flag without its dashes.
        value: The value in the file.
        where: The file and the entry, for errors.

    Raises:
        ConfigError: See `without_peer_flags`.
    """
    flag = _normalized(f"--{name}")
    is_off = value is None or value is False
    if flag in PEER_FLAGS:
        if value is not None:
            check_value(flag, str(value), where)
    elif flag in TRANSLATIONS:
        meaning = TRANSLATIONS[flag]
        return [] if is_off else [*meaning.defaults, *translate(flag, str(value))]
    elif flag in INSTEAD:
        if not is_off:
            raise not_here(where or flag)
    elif not has_no_effect(flag):
        return None
    return []


def flags_without_effect(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line that choose something that Engine does not have."""
    names = (_normalized(argument.partition("=")[0]).partition(".")[0] for argument in argv)
    return [name for name in names if name.startswith("-") and has_no_effect(name)]


def check_value(flag: str, value: str, where: str = "") -> None:
    """Raise ConfigError if a value of a flag in `PEER_FLAGS` does not describe what Engine does."""
    accepted = PEER_FLAGS[flag]
    if accepted and value not in accepted:
        hint = f"; {INSTEAD[flag]}" if flag in INSTEAD else ""
        raise ConfigError(f"{where or flag} must be {' or '.join(accepted)}, got {value!r}{hint}")


def not_here(flag: str) -> ConfigError:
    """Return the error for a flag of another server that needs another command line."""
    return ConfigError(f"{flag} is a flag of another server; {INSTEAD[_own(flag)]}")


def _with_file_of_repository(argv: Sequence[str]) -> list[str]:
    """Return a command line in which the value of `--hf-repo` names the file of `--hf-file`, as in llama.cpp."""
    given = list(argv)
    found: dict[tuple[str, ...], str] = {}
    for names in (_FILE, _REPOSITORY):
        for i, argument in enumerate(given):
            name, equals, value = argument.partition("=")
            if (flag := _normalized(name)) in names:
                end = i + 1 if equals else i + 2
                found[names] = value if equals else _value_at(given, i + 1, flag)
                del given[i:end]
                break
        if names not in found:
            return list(argv)
    return [_REPOSITORY[0], f"{found[_REPOSITORY].partition(':')[0]}:{found[_FILE]}", *given]


def _own(where: str) -> str:
    name = where.rpartition(" ")[2]
    return name if name in INSTEAD else _normalized(f"--{name}")


def _normalized(name: str) -> str:
    if not name.startswith("--"):
        return name
    head, dot, path = name.partition(".")
    return head.replace("_", "-") + dot + path


def _is_switch(flag: str) -> bool:
    return flag in SWITCHES or flag.startswith("--no-")


def _value_at(argv: Sequence[str], index: int, flag: str) -> str:
    """Return the value of a flag, which may begin with a dash only if it is a number."""
    value = argv[index] if index < len(argv) else "--"
    if value.startswith("-") and not value[1:2].isdigit():
        raise ConfigError(f"{flag} needs a value")
    return value
