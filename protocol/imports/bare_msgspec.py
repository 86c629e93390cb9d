"""msgspec without `typing_extensions`, which takes 40 % of the time in which it is imported.

It looks there for functions that Python 3.11 and later have in `typing`.
"""

from __future__ import annotations

import sys


def install() -> None:
    """Import msgspec. Does nothing but this if it or `typing_extensions` is imported already."""
    names = ("msgspec", "typing_extensions")
    if not any(name in sys.modules for name in names):
        # An import of a module that is None fails, and msgspec then takes the functions of `typing`.
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules["typing_extensions"]
