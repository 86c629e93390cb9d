"""All that an object keeps alive."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

_NOT_FOLLOWED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def reachable(root: object) -> list[object]:
    """Return the objects that `root` refers to, directly or not, without those behind classes and functions."""
    found: dict[int, object] = {}
    unseen = [root]
    while unseen:
        item = unseen.pop()
        if id(item) not in found and not isinstance(item, _NOT_FOLLOWED):
            found[id(item)] = item
            unseen += gc.get_referents(item)
    return list(found.values())
