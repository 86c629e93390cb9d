"""Start grammar processes for a process that uses grammars."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ..isolation.processes import IsolatedProcesses
from .messages import CHECK_STACK_BYTES, MAX_CPU_S, MAX_MEMORY_BYTES, MAX_WALL_S

_MIB = 1 << 20


class GrammarProcesses(IsolatedProcesses):
    """Starts grammar processes through a fork server that has loaded the tokenizer. Thread-safe.

    The path of the tokenizer may be given as a function that returns it.
    """

    def __init__(
        self,
        tokenizer_path: str | Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        def arguments() -> list[str]:
            path = tokenizer_path() if callable(tokenizer_path) else tokenizer_path
            return [path, str(vocab_size), *map(str, eos_token_ids)]

        super().__init__(f"{__package__}.fork_server", arguments)


def describe_exit(signum: int | None) -> str:
    """Return which limit a grammar process exceeded that was ended by this signal, or for an unknown reason."""
    match signum:
        case signal.SIGPROF:
            return f"takes more than {MAX_CPU_S} s of processor time; use a smaller one"
        case signal.SIGALRM:
            return f"takes more than {MAX_WALL_S} s; use a smaller one"
        case signal.SIGABRT | signal.SIGKILL:
            return f"needs more than {MAX_MEMORY_BYTES // _MIB} MiB of memory; use a smaller one"
        case signal.SIGSEGV | signal.SIGBUS:
            return (
                f"is nested too deeply: it needs more than {CHECK_STACK_BYTES // _MIB} MiB of stack; "
                "use fewer levels of rules, references or nesting"
            )
        case _:
            return "cannot be compiled: its process was lost"
