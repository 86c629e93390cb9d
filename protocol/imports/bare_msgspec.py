"""msgspec without `typing_extensions`, which takes 40 % of the time in which it is imported.

msgspec needs it only for functions that `typing` lacks before Python 3.11.
"""

from __future__ import annotations

import sys


def install() -> None:
    """Import msgspec without `typing_extensions`. Does nothing if either is imported already."""
    names = ("msgspec", "typing_extensions")
    if not any(name in sys.modules for name in names):
        # An import of a module that is None fails, and msgspec then takes the functions of `typing`.
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules["typing_extensions"]
