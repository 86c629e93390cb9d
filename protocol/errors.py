"""Errors that every process of the engine raises and understands."""

from os import PathLike
from typing import Final

POISON_REQUEST: Final = (
    "this request was being computed when a process of the engine died, and alone when another one did: "
    "it is not tried again"
)
"""The error of a request that is taken to have caused crashes."""


class EngineError(Exception):
    """Base of the errors that the engine raises on purpose; the message is fit for a user."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint that is missing, damaged or not supported.

    The message names the file, then what is wrong with it and, where there is one, the remedy.
    """

    def __init__(self, path: str | PathLike[str], problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class ConfigError(EngineError, ValueError):
    """A start that cannot succeed as configured; the message ends with the remedy."""


class RunDirectoryError(ConfigError):
    """A file in the run directory that cannot be written; the message names it, the reason and the remedy."""

    def __init__(self, path: str | PathLike[str], reason: str | None) -> None:
        super().__init__(
            f"cannot write {path}: {reason}; make room there, or set XDG_RUNTIME_DIR to another directory"
        )


class ParameterError(EngineError, ValueError):
    """A request parameter out of its range. `param` names the field, the message the value and the limit."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param
