"""Import torch at its first use only, in workers whose model runs as a native program.

Importing torch takes more than a second and 200 MiB, and a native program does not need it. Most modules of this
package mention torch, but little of that code runs in such a worker. `install` therefore puts stand-in modules into
`sys.modules`, which `import torch` finds. The first use of anything except a class or a decorator replaces them with
torch itself.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SUBMODULES: Final = ("nn", "nn.functional", "distributed")
"""The submodules of torch that modules of this package import by name."""

_CLASSES: Final = ("Tensor", "dtype", "device")
"""The torch classes that modules of this package refer to while they are imported."""

_PACKAGE: Final = __name__.removesuffix("device.lazy_torch")
"""Begins the names of this package's modules."""

_lock = threading.RLock()
_preloaded: list[str] = []


def install() -> None:
    """Delay importing torch until its first use. Does nothing if torch is imported already."""
    if "torch" not in sys.modules:
        for name in ("torch", *(f"torch.{name}" for name in _SUBMODULES)):
            sys.modules[name] = _LazyModule(name)


@contextmanager
def preloading() -> Iterator[None]:
    """Let modules of this package be imported without torch, for processes that are forked from this one.

    A forked process calls `install`, or `discard_preloaded` if it needs torch.
    """
    before = set(sys.modules)
    install()
    yield
    for name in set(sys.modules) - before:
        if isinstance(sys.modules[name], _LazyModule):
            del sys.modules[name]
        elif name.startswith(_PACKAGE):
            _preloaded.append(name)


def discard_preloaded() -> None:
    """Remove the preloaded modules, so that they are imported again, with torch itself."""
    for name in _preloaded:
        parent, _, attribute = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(attribute, None)
        del sys.modules[name]
    _preloaded.clear()


def is_torch_loaded() -> bool:
    """Return whether torch itself is imported."""
    return not isinstance(sys.modules.get("torch"), _LazyModule | None)


def _load(name: str) -> ModuleType:
    """Import a module of torch itself, and return it."""
    with _lock:
        if not is_torch_loaded():
            for each in [key for key, found in sys.modules.items() if type(found) is _LazyModule]:
                del sys.modules[each]
            # The native program has its own threads, which spinning threads of torch would slow down.
            importlib.import_module("torch").set_num_threads(1)
        return importlib.import_module(name)


class _LazyModule(ModuleType):
    """A stand-in for a torch module, which imports torch when an unknown attribute is read."""

    # The import system asks every module for this attribute.
    __path__: list[str] = []  # noqa: RUF012 - that of a module

    def __getattr__(self, name: str) -> Any:
        if not is_torch_loaded():
            if name.startswith("__"):
                raise AttributeError(name)
            if self.__name__ == "torch":
                if name in _CLASSES:
                    return _LazyClass(name, (), {})
                if name == "inference_mode":
                    return _InferenceMode
            full_name = f"{self.__name__}.{name}"
            if isinstance(found := sys.modules.get(full_name), _LazyModule):
                return found
            if self.__name__ == "torch.nn.functional":
                return _LazyFunction(name)
        value = getattr(_load(self.__name__), name)
        # Store the attribute, so that further uses do not call this method.
        self.__dict__[name] = value
        return value


class _LazyClass(type):
    """A metaclass for stand-ins of torch classes, whose instances and subclasses are torch's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return is_torch_loaded() and isinstance(instance, getattr(_load("torch"), cls.__name__))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the torch class."""
        return getattr(_load("torch"), cls.__name__)(*args, **kwargs)


class _LazyFunction:
    """A stand-in for a torch function, which imports torch when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_load("torch.nn.functional"), self._name)(*args, **kwargs)


class _InferenceMode(AbstractContextManager[None]):
    """A stand-in for `torch.inference_mode`, which takes effect in calls after torch was imported."""

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with _InferenceMode():
                return function(*args, **kwargs)

        return call

    def __enter__(self) -> None:
        self._mode = _load("torch").inference_mode() if is_torch_loaded() else nullcontext()
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
