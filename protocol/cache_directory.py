"""Where this package keeps what would be slow to make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """`kind` in `$ENGINE_CACHE`, else in `engine` in the user's cache directory."""
    if configured := os.environ.get("ENGINE_CACHE"):
        return Path(configured).expanduser() / kind
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "engine" / kind
