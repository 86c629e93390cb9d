"""numpy without its documentation and its types for type checkers.

They take a quarter of the time in which numpy is imported.
"""

from __future__ import annotations

import sys
from types import GenericAlias, ModuleType
from typing import Any, Final, TypeVar

from . import late_modules

_DOCUMENTATION: Final = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
_TYPES: Final = "numpy._typing"

_Scalar = TypeVar("_Scalar")


def _stand_in(name: str) -> Any:
    """Return a type with a parameter, because numpy only writes its types in annotations."""
    if name.startswith("__"):
        raise AttributeError(name)
    return list


def install() -> None:
    """Import numpy. Does nothing if it is imported already.

    The module of types runs when another of its attributes than `NDArray` is read.
    """
    if "numpy" in sys.modules:
        return
    stand_ins = {name: ModuleType(name) for name in (*_DOCUMENTATION, _TYPES)}
    stand_ins[_TYPES].__dict__["__getattr__"] = _stand_in
    sys.modules.update(stand_ins)
    try:
        import numpy as np
    finally:
        for name in stand_ins:
            del sys.modules[name]
    types = late_modules.register("numpy.typing")
    dtype = GenericAlias(np.dtype, (_Scalar,))
    types.__dict__["NDArray"] = GenericAlias(np.ndarray, (tuple[Any, ...], dtype))
    np.__dict__["typing"] = types
