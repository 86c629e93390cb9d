"""Number of examples that Hypothesis tries in the nightly, the full and the fast run."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import settings

SHARES: Final = {"nightly": 1.0, "full": 0.3, "fast": 0.1}


def share(number: int) -> int:
    """Return the share of a nightly run's number that this run tries."""
    return max(int(number * SHARES[settings.get_current_profile_name()]), 1)


def examples(num_examples: int, **options: Any) -> settings:
    """Return settings for `num_examples` in a nightly run, and for a share of them in others."""
    return settings(max_examples=share(num_examples), **options)
