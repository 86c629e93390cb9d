"""The reasons why a step stopped admitting requests, as reported by statistics and `engine replay`."""

from __future__ import annotations

import enum


class AdmissionStop(enum.StrEnum):
    """The reason why a step stopped admitting.

    It applies to waiting requests without a `WaitReason`.
    """

    NONE_LEFT = enum.auto()
    """No request is left in the queue: all were admitted or set aside."""
    PREEMPTION = enum.auto()
    """A running request was preempted, so no request is admitted to the step."""
    TOKENS_IN_FLIGHT = enum.auto()
    """A request that was preempted earlier still waits for its tokens in flight."""
    SEQUENCES = enum.auto()
    """All slots are taken (`max_num_seqs`)."""
    TOKENS = enum.auto()
    """The token budget of the step is used up (`max_num_batched_tokens`)."""
    MESSAGE = enum.auto()
    """The step message to the workers has no room for the tokens of another new request."""
    ISOLATION = enum.auto()
    """A request suspected of crashing a worker must run alone."""
    ENCODERS = enum.auto()
    """The encoder budget or the encoder cache is used up."""
    BLOCKS = enum.auto()
    """Too few KV-cache blocks are free."""
    DELAY = enum.auto()
    """Admission is delayed so that several prompts are computed together."""
    PARTIAL_PREFILLS = enum.auto()
    """The maximum number of prompts is already being computed in chunks."""
