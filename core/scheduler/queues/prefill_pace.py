"""Limit the prompt tokens of steps in which other requests decode (`--prefill-step-ms`)."""

from __future__ import annotations

from typing import Final

from ...state.batch import StepInFlight

MIN_PROMPT_TOKENS: Final = 32
"""Fewest prompt tokens per step: with fewer, reading the weights would take a large part of the step."""

DECODE_FACTOR: Final = 2.0
"""Prompts may take this many times as long as a step that only decodes, even if that is more than the limit."""

MAX_CHANGE: Final = 2.0
"""Largest factor by which one step changes an estimate, so that a single delayed step has little effect."""


class PrefillPace:
    """Estimates from the durations of steps how many prompt tokens take `limit_ms` milliseconds; 0 means no limit.

    A token costs more the further back it attends, so the estimate follows the prompts that are being computed.
    """

    def __init__(self, limit_ms: float) -> None:
        self._limit_s = limit_ms / 1e3
        self._decode_s = 0.0
        self._token_s = 0.0
        self._last_output_at = 0.0

    def record_step(self, step: StepInFlight, now: float) -> None:
        """Record a step whose output arrived at `now`. It began when it was scheduled or the previous one ended."""
        seconds = now - max(step.scheduled_at, self._last_output_at)
        self._last_output_at = now
        if not step.num_prompt_tokens:
            self._decode_s = _follow(self._decode_s, seconds)
        elif seconds > self._decode_s:
            self._token_s = _follow(
                self._token_s, (seconds - self._decode_s) / step.num_prompt_tokens
            )

    def limit_tokens(self, budget: int) -> int:
        """Return how many of `budget` tokens prompts may use in a step in which other requests decode."""
        if not self._limit_s or not self._token_s:
            return budget
        seconds = max(self._limit_s - self._decode_s, DECODE_FACTOR * self._decode_s)
        return min(max(int(seconds / self._token_s), MIN_PROMPT_TOKENS), budget)


def _follow(estimate: float, measured: float) -> float:
    """Return the measured value, at most `MAX_CHANGE` times larger or smaller than the estimate."""
    if not estimate:
        return measured
    return min(max(measured, estimate / MAX_CHANGE), estimate * MAX_CHANGE)
