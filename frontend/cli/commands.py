"""The commands of `engine`, in the order of its help, with the modules that run them."""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command and where its code is.

    Attributes:
        usage: Its arguments, in short.
        summary: What it does, in a few words.
        module: The module with the functions `function` and `make_parser`. A relative name is one of this package.
        function: The function that runs the command with its arguments and returns the exit code.
        is_program: Whether the module replaces this process, because it needs none of its modules or may not be
            imported by the frontend.
    """

    usage: str
    summary: str
    module: str
    function: str = "main"
    is_program: bool = False


COMMANDS: Final = {
    "serve": Command(
        "[MODEL] [flags]",
        "serve a model over HTTP; see engine serve --help",
        ".serve",
        "serve",
    ),
    "chat": Command(
        "[MODEL] [--url URL] [flags]",
        "chat with a model, with or without a running server",
        ".talk.chat",
    ),
    "complete": Command(
        "[PROMPT] [--url URL] [flags]", "continue a text, of standard input too", ".talk.complete"
    ),
    "upgrade": Command(
        "[MODEL] [flags]",
        "replace a running server by a new version or model, without downtime",
        ".upgrade",
        "upgrade",
    ),
    "embed": Command(
        "[MODEL] [flags]",
        "embed the lines of a file, without a server",
        "engine.frontend.offline.embed",
        is_program=True,
    ),
    "transcribe": Command(
        "FILE --model MODEL",
        "write down what is said in audio files, without a server",
        "engine.frontend.offline.transcribe",
        is_program=True,
    ),
    "run-batch": Command(
        "-i FILE -o FILE [--url URL] [flags]",
        "answer a file of requests, with or without a server",
        "engine.frontend.offline.run_batch",
        is_program=True,
    ),
    "status": Command(
        "[--url URL]", "show a live table of a running server's processes", ".status", "status"
    ),
    "why": Command(
        "ID [--url URL]", "explain what happened to a request of a running server", ".why", "why"
    ),
    "replay": Command(
        "FILE [flags]",
        "replay a scheduler dump, or explain why a request waited",
        "engine.core.replay.__main__",
        is_program=True,
    ),
    "simulate": Command(
        "TRACE [flags]",
        "predict the latency and throughput of a trace",
        "engine.core.simulation.__main__",
        is_program=True,
    ),
    "keygen": Command(
        "[--out FILE]",
        "create the key that the machines of one engine share",
        ".keygen",
        "keygen",
    ),
    "worker": Command(
        "--core HOST:PORT --key FILE",
        "run one worker on this machine (torchrun starts it)",
        ".join",
        "work",
    ),
}

_USAGE_WIDTH: Final = 26


def describe_commands() -> str:
    """Return a line or two for each command, for `engine --help`."""
    lines = ["commands:"]
    for name, command in COMMANDS.items():
        usage = f"  {name} {command.usage}".rstrip()
        if len(usage) < _USAGE_WIDTH + 1:
            lines.append(f"{usage:{_USAGE_WIDTH + 2}}{command.summary}")
        else:
            lines += [usage, " " * (_USAGE_WIDTH + 2) + command.summary]
    return "\n".join(lines) + "\n"
