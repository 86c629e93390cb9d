"""The table of the `engine` commands, in the order of `engine --help`, with the module that runs each one."""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command of `engine`, and the module that runs it.

    Attributes:
        usage: The arguments as `engine --help` shows them.
        summary: The purpose of the command, in a few words.
        module: The module with the functions `function` and `make_parser`. A name with a leading dot is relative to
            this package.
        function: The function that runs the command with its arguments and returns the exit code.
        is_program: True if the module runs as a program that replaces this process. That is so for modules of the core,
            which the frontend must not import.
        takes_serve_flags: True if the flags of `engine serve` apply as well.
    """

    usage: str
    summary: str
    module: str
    function: str = "main"
    is_program: bool = False
    takes_serve_flags: bool = False


COMMANDS: Final = {
    "serve": Command(
        "[MODEL] [flags]",
        "serve a model over HTTP; see engine serve --help",
        ".start",
        "serve",
    ),
    "chat": Command(
        "[MODEL] [--url URL] [flags]",
        "chat with a model, with or without a running server",
        ".talk.chat",
        takes_serve_flags=True,
    ),
    "complete": Command(
        "[PROMPT] [--url URL] [flags]",
        "continue a text from the command line or standard input",
        ".talk.complete",
        takes_serve_flags=True,
    ),
    "bench": Command(
        "serve|throughput|latency|compare",
        "measure any server with OpenAI's API",
        ".bench.command",
        takes_serve_flags=True,
    ),
    "router": Command(
        "FILE [flags]",
        "serve several models at one address, each loaded when it is needed",
        "engine.frontend.router.command",
    ),
    "upgrade": Command(
        "[MODEL] [flags]",
        "replace a running server by a new version or model, without downtime",
        ".upgrade",
        "upgrade",
        takes_serve_flags=True,
    ),
    "embed": Command(
        "[MODEL] [flags]",
        "embed the lines of a file, with or without a server",
        "engine.frontend.offline.embed",
        is_program=True,
        takes_serve_flags=True,
    ),
    "transcribe": Command(
        "FILE --model MODEL",
        "transcribe audio files, without a server",
        "engine.frontend.offline.transcribe",
        is_program=True,
        takes_serve_flags=True,
    ),
    "run-batch": Command(
        "-i FILE -o FILE [--url URL] [flags]",
        "process a batch file of requests, with or without a server",
        "engine.frontend.offline.run_batch",
        is_program=True,
        takes_serve_flags=True,
    ),
    "status": Command(
        "[--url URL]", "show a live table of a running server's processes", ".status", "status"
    ),
    "top": Command(
        "[--url URL]", "show a live table of a running server's load and latencies", ".watch.top"
    ),
    "why": Command(
        "ID [--url URL]", "explain what happened to a request of a running server", ".why", "why"
    ),
    "doctor": Command(
        "[MODEL...]",
        "describe this machine, what it can serve, and what is misconfigured",
        ".machine.doctor",
    ),
    "models": Command(
        "[rm NAME...]", "list or remove the models on this machine", ".machine.models"
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
    "plan": Command(
        "--trace TRACE --slo NAME=TIME,…",
        "find the replicas and batch limits that meet latency objectives",
        "engine.core.simulation.plan",
        is_program=True,
    ),
    "keygen": Command(
        "[--out FILE]",
        "create the key that the machines of one engine share",
        ".keygen",
        "keygen",
    ),
    "worker": Command(
        "--core HOST:PORT --cluster-key FILE",
        "run one worker on this machine (torchrun starts it)",
        ".join",
        "work",
    ),
    "completion": Command(
        "bash|zsh|fish", "print a script that completes commands and flags", ".completion.command"
    ),
}

_USAGE_WIDTH: Final = 26


def describe_commands() -> str:
    """Return the lines of `engine --help` that describe the commands, one or two for each."""
    lines = ["commands:"]
    for name, command in COMMANDS.items():
        usage = f"  {name} {command.usage}".rstrip()
        if len(usage) < _USAGE_WIDTH + 1:
            lines.append(f"{usage:{_USAGE_WIDTH + 2}}{command.summary}")
        else:
            lines += [usage, " " * (_USAGE_WIDTH + 2) + command.summary]
    return "\n".join(lines) + "\n"
