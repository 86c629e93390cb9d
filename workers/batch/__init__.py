"""The batch of a worker: the state of its requests by slot, and the plan of a step."""

from .persistent_batch import (
    AttentionBatch,
    PersistentBatch,
    SlotArray,
    StepPlan,
    even_requests,
    mixed_requests,
    plan_chunks,
)

__all__ = [
    "AttentionBatch",
    "PersistentBatch",
    "SlotArray",
    "StepPlan",
    "even_requests",
    "mixed_requests",
    "plan_chunks",
]
