"""Locate the directory for files that are expensive to create or download again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """Return `$ENGINE_CACHE/KIND`, by default `engine/KIND` in the user's cache directory."""
    if configured := os.environ.get("ENGINE_CACHE"):
        return Path(configured).expanduser() / kind
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "engine" / kind
