"""Completion scripts for bash, zsh and fish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .tree import Flag, Node


def bash_script(root: Node) -> str:
    """Return a script for bash: it completes commands, flags, values of flags, and files."""
    lines = [
        "# Completion of engine for bash.",
        "_engine() {",
        '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path="" word words',
        "    for word in ${COMP_WORDS[@]:1:COMP_CWORD-1}; do",
        '        case "$path $word" in',
    ]
    paths = [" ".join(("", *node.words)) for node in root.walk() if node.words]
    lines += [
        f'            {"|".join(_quote(path) for path in paths)}) path="$path $word" ;;',
        "        esac",
        "    done",
        '    case "$path $prev" in',
    ]
    for node in root.walk():
        for flag in node.flags:
            if flag.choices:
                keys = "|".join(_quote(" ".join(("", *node.words, name))) for name in flag.names)
                words = " ".join(flag.choices)
                lines.append(
                    f'        {keys}) COMPREPLY=($(compgen -W {_quote(words)} -- "$cur")); return ;;'
                )
    lines += ["    esac", '    case "$path" in']
    for node in root.walk():
        key = _quote(" ".join(("", *node.words)) if node.words else "")
        flags = _quote(" ".join(name for flag in node.flags for name in flag.names))
        words = _quote(" ".join((*(c.words[-1] for c in node.children), *node.words_of_arguments)))
        lines.append(
            f"        {key}) if [[ $cur == -* ]]; then words={flags}; else words={words}; fi ;;"
        )
    lines += [
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _engine engine",
    ]
    return "\n".join(lines) + "\n"


def zsh_script(root: Node) -> str:
    """Return a script for zsh: it completes commands, flags with their help, values of flags, and files."""
    lines = ["#compdef engine", ""]
    for node in root.walk():
        lines += _zsh_function(node)
    lines += [
        'if [ "$funcstack[1]" = "_engine" ]; then _engine "$@"; else compdef _engine engine; fi'
    ]
    return "\n".join(lines) + "\n"


def _zsh_name(node: Node) -> str:
    return "_".join(("_engine", *(word.replace("-", "_") for word in node.words)))


def _zsh_function(node: Node) -> list[str]:
    lines = [f"{_zsh_name(node)}() {{", "    local -a commands arguments", "    arguments=("]
    for flag in node.flags:
        shown = flag.help.replace("[", "(").replace("]", ")").replace(":", " -")
        value = ""
        if flag.choices:
            value = f":value:({' '.join(flag.choices)})"
        elif flag.has_value:
            value = ":value:_files"
        lines += [f"        {_quote(f'{name}[{shown}]{value}')}" for name in flag.names]
    if node.children:
        lines += ["        '1:command:->command'", "        '*::argument:->argument'", "    )"]
        lines += ["    local state line", "    _arguments -C $arguments", "    case $state in"]
        described = " ".join(
            _quote(f"{child.words[-1]}:{child.help.replace(':', ' -')}") for child in node.children
        )
        lines.append(f"        command) commands=({described}); _describe command commands ;;")
        lines.append("        argument) case $line[1] in")
        lines += [
            f"            {child.words[-1]}) {_zsh_name(child)} ;;" for child in node.children
        ]
        lines += ["        esac ;;", "    esac"]
    else:
        words = f"({' '.join(node.words_of_arguments)})" if node.words_of_arguments else "_files"
        lines += [f"        '*:argument:{words}'", "    )", "    _arguments $arguments"]
    return [*lines, "}", ""]


def fish_script(root: Node) -> str:
    """Return a script for fish: it completes commands, flags with their help, values of flags, and files."""
    lines = ["# Completion of engine for fish.", "complete -c engine -e"]
    names = " ".join(child.words[-1] for child in root.children)
    lines += [
        f"complete -c engine -n 'not __fish_seen_subcommand_from {names}' -f "
        f"-a {child.words[-1]} -d {_quote(child.help)}"
        for child in root.children
    ]
    for node in root.walk():
        if not node.words:
            continue
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in node.words)
        lines += [
            f"complete -c engine -n '{seen}' -f -a {child.words[-1]} -d {_quote(child.help)}"
            for child in node.children
        ]
        if node.words_of_arguments:
            lines.append(
                f"complete -c engine -n '{seen}' -f -a {_quote(' '.join(node.words_of_arguments))}"
            )
        lines += [_fish_flag(seen, flag) for flag in node.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(seen: str, flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
        for name in flag.names
        if name.startswith("--") or len(name) == 2
    )
    value = ""
    if flag.choices:
        value = f" -x -a {_quote(' '.join(flag.choices))}"
    elif flag.has_value:
        value = " -r"
    return f"complete -c engine -n '{seen}' {names}{value} -d {_quote(flag.help)}"


def _quote(text: str) -> str:
    """Return the text in single quotes, for all three shells."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


SCRIPTS: Final[dict[str, Callable[[Node], str]]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
