"""Load the scheduler class that `--scheduler-cls` names."""

from __future__ import annotations

import inspect
from importlib import import_module

from ...protocol.errors import ConfigError
from .interface import SchedulerInterface
from .scheduler import Scheduler


def load_scheduler_class(name: str | None) -> type[SchedulerInterface]:
    """Import the class `module.Class`; None selects the built-in scheduler.

    Raises:
        ConfigError: There is no such class, or it does not implement all of
            `SchedulerInterface`.
    """
    if name is None:
        return Scheduler
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:
        # Importing a module runs its code, which may raise anything.
        raise ConfigError(
            f"--scheduler-cls {name} cannot be loaded: {type(error).__name__}: {error}; "
            "name it as module.Class, with the module installed or in PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, SchedulerInterface)):
        raise ConfigError(
            f"--scheduler-cls {name} is not a subclass of engine.core.scheduler.interface.SchedulerInterface"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"--scheduler-cls {name} does not implement {missing}")
    return found
