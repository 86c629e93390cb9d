"""Number of examples that Hypothesis tries in the full and in the fast run."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(num_examples: int, **options: Any) -> settings:
    """Return settings for `num_examples` in the full run and a tenth of them in the fast one."""
    if settings.get_current_profile_name() == "fast":
        num_examples = max(num_examples // 10, 1)
    return settings(max_examples=num_examples, **options)
