"""The names that clients give to the weights."""

from __future__ import annotations

import os

from ....protocol.config.weights import WEIGHTS_OF_START, WeightsFiles
from ...client.engine_client import EngineClient


class WeightNames:
    """Reads the name of the current weights, which another frontend may change."""

    def __init__(self, run_dir: str, engine: EngineClient) -> None:
        self._files = WeightsFiles(run_dir)
        self._engine = engine
        self._stamp = (0, 0)
        self._current = WEIGHTS_OF_START

    def find(self, replica: int = 0) -> str:
        """Return the name of the weights of a replica, by default "default"."""
        # The name that the weights had when the replica loaded them.
        loaded = self._engine.cores[replica].weights[1]
        return self._find_newer(loaded) or "default"

    def _find_newer(self, loaded: str) -> str:
        try:
            status = os.stat(self._files.current)
        except FileNotFoundError:
            return loaded
        if self._files.is_updating:
            return loaded
        stamp = status.st_ino, status.st_mtime_ns
        if stamp != self._stamp:
            self._current, self._stamp = self._files.read_current(), stamp
        return self._current.version
