"""Errors that are common to all processes of the engine, and the words of counts in messages."""

from os import PathLike
from typing import ClassVar, Final

NO_ADAPTER_MEMORY: Final = "too little memory is free for the LoRA adapter"
"""The beginning of the error of requests whose adapter could not be loaded now, but perhaps later."""

POISON_REQUEST: Final = (
    "this request was running when a process of the engine crashed, and alone when another one crashed; "
    "it is not retried"
)
"""Error message that the client of a poison request gets."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class EngineError(Exception):
    """Base class of the errors that Engine raises on purpose. The message is meant for users."""

    exit_code: ClassVar = 1
    """Exit code of a process that ends with this error."""


class PeerLostError(EngineError):
    """Raised if a process must exit because it lost the connection to another worker."""

    exit_code: ClassVar = 4


class CheckpointError(EngineError, ValueError):
    """Raised for a checkpoint that is missing, damaged or not supported.

    The message names the file, the problem and, if there is one, the remedy.
    """

    def __init__(self, path: str | PathLike[str], problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class ConfigError(EngineError, ValueError):
    """Raised for a configuration with which the engine cannot start. The message ends with the remedy."""


class RunDirectoryError(ConfigError):
    """Raised for a file in the run directory that cannot be written.

    The message names the file, the reason and the remedy.
    """

    def __init__(self, path: str | PathLike[str], reason: str | None) -> None:
        super().__init__(
            f"cannot write {path}: {reason}; free some space there, or set XDG_RUNTIME_DIR to another directory"
        )


class UnavailableError(EngineError):
    """Raised for a request that fails through no fault of its own, because the server lacks a resource."""


class ParameterError(EngineError, ValueError):
    """Raised for an invalid request parameter. `param` names the field; `problem` has the value and the limit."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param
        self.problem = problem
