"""The names that other servers use for fields of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

Aliases: TypeAlias = Mapping[str, tuple[str, ...]]
"""Field -> names that other servers use for it. The field's own name has priority."""

GENERATION_ALIASES: Final[Aliases] = {
    "max_tokens": ("n_predict", "max_new_tokens"),
    "min_tokens": ("min_new_tokens",),
    "repetition_penalty": ("repeat_penalty",),
    "include_stop_str_in_output": ("no_stop_trim",),
    "cache_salt": ("extra_key",),
    "seed": ("random_seed",),
    "data_parallel_rank": ("routed_dp_rank",),
}

CHAT_ALIASES: Final[Aliases] = {
    **GENERATION_ALIASES,
    "prompt_token_ids": ("input_ids",),
    "thinking_token_budget": (
        "reasoning_budget_tokens",
        "thinking_budget_tokens",
        "thinking_budget",
    ),
}


def read_aliases(request: Any, aliases: Aliases) -> None:
    """Set fields that a request has only under another name, and remove values that a field's own name overrides."""
    for name, others in aliases.items():
        for alias in others:
            value = getattr(request, alias)
            if value is None:
                continue
            if getattr(request, name) is None:
                setattr(request, name, value)
            elif getattr(request, name) != value:
                setattr(request, alias, None)


def read_reasoning(request: Any) -> None:
    """Set the fields of reasoning that a chat has only in the object `reasoning` or as `enable_thinking`."""
    if (given := request.reasoning) is not None:
        if request.reasoning_effort is None:
            request.reasoning_effort = given.effort
        if request.thinking_budget is None:
            request.thinking_budget = given.max_tokens
        if request.enable_thinking is None:
            request.enable_thinking = given.enabled
        if request.include_reasoning is None and given.exclude is not None:
            request.include_reasoning = not given.exclude
    if request.thinking is None and request.enable_thinking is not None:
        request.thinking = {"type": "enabled" if request.enable_thinking else "disabled"}
