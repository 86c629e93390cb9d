"""Methods that only forward a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def forwarded(method: Method, *, to: str) -> Method:
    """Return a method that calls the same method of the object in the attribute `to`."""
    name = method.__name__

    @wraps(method, assigned=("__name__", "__doc__"), updated=())
    def forward(self: object, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, to), name)(*args, **kwargs)

    return cast(Method, forward)


def forwarded_to_all(method: Method, *, to: str) -> Method:
    """Return a method that calls the same method of each object in the attribute `to`, and returns nothing."""
    name = method.__name__

    @wraps(method, assigned=("__name__", "__doc__"), updated=())
    def forward(self: object, *args: Any) -> None:
        for each in getattr(self, to):
            getattr(each, name)(*args)

    return cast(Method, forward)
