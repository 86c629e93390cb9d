"""The methods of `LLM` that control its processes: caches, sleep and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...protocol.config.weights import WeightsFiles
from ...protocol.messages import PauseMode
from ..model_source.weights import find_weights
from .local_engine import LocalEngine
from .prompts import PromptEncoder

if TYPE_CHECKING:
    from .drop_in.metrics import Metric


class ControlMethods:
    """The methods of `LLM` that control its processes, and what they need."""

    _engine: LocalEngine
    _prompts: PromptEncoder

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of workers, by default of all replicas."""
        parallel = self._engine.config.parallel
        return parallel.num_workers if include_dp else parallel.workers_per_core

    def get_metrics(self) -> list[Metric]:
        """Return all metrics as they are now: a `Counter`, `Gauge`, `Histogram` or `Vector` for each.

        Names begin with `engine:`, and those of vLLM with `vllm:`.
        """
        # A late import, because other uses do not need prometheus-client.
        from .drop_in.metrics import read_families

        async def collect() -> list[Metric]:
            return read_families(self._engine.client.metrics.families())

        return self._engine.run(collect())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear the prefix cache. Return False if running requests prevented it.

        Args:
            reset_running_requests: True to free the blocks of running requests, too, which are computed again.
        """
        calls = self._engine.client.calls
        return self._engine.run(calls.reset_prefix_cache(reset_running_requests))

    def reset_mm_cache(self) -> None:
        """Drop the images, videos and audio that later prompts could refer to by name."""
        self._prompts.forget_named_media()

    def sleep(self, level: int = 1, mode: str = PauseMode.ABORT) -> None:
        """Free all memory of the model until `wake_up`. Requests wait meanwhile.

        Args:
            level: As in vLLM, 0 only pauses. 1 and 2 are the same here.
            mode: What happens to running requests: `abort` ends them, `wait` finishes them first, and `keep` continues
                them after the sleep.

        Raises:
            ValueError: The level or the mode is invalid.
            EngineError: Some processes did not stop.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"level must be 0, 1 or 2, got {level}")
        client, pause = self._engine.client, PauseMode(mode)
        self._engine.run(client.calls.pause(pause, clear_cache=pause is not PauseMode.KEEP))
        if level:
            self._engine.run(client.sleep.sleep())

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model again, and generate. With `tags` that lack `kv_cache` and `scheduling`, only load it.

        Raises:
            EngineError: The model was not loaded.
        """
        client = self._engine.client
        self._engine.run(client.sleep.wake())
        if not tags or {"kv_cache", "scheduling"} & {*tags}:
            self._engine.run(client.calls.resume())

    def load_weights(self, path: str) -> None:
        """Load other weights of the model, from a local checkpoint or the hub.

        Running requests continue with them; what is cached of prompts is computed again.

        Raises:
            ConfigError: They do not exist, or belong to another model.
            CheckpointError: The checkpoint is incomplete or cannot be read.
            EngineError: The workers could not load them, and have the previous ones again.
        """
        client, config = self._engine.client, self._engine.config
        weights = find_weights(config.model, path)
        self._engine.run(client.sleep.load_weights(WeightsFiles(config.run_dir), weights))
