"""Reasons why a step admitted no further request."""

from __future__ import annotations

import enum


class AdmissionStop(enum.StrEnum):
    """The reason why a step stopped admitting.

    It applies to waiting requests that have no `WaitReason` of their own.
    """

    NONE_LEFT = enum.auto()
    """No request is left in the queue: all were admitted or set aside."""
    PREEMPTION = enum.auto()
    """A running request was preempted, so the step admits none."""
    TOKENS_IN_FLIGHT = enum.auto()
    """An earlier preempted request waits for its tokens in flight."""
    SEQUENCES = enum.auto()
    """All slots are taken (`max_num_seqs`)."""
    TOKENS = enum.auto()
    """The token budget of the step is used up (`max_num_batched_tokens`)."""
    MESSAGE = enum.auto()
    """The tokens of new requests fill the message of the step."""
    ISOLATION = enum.auto()
    """A request suspected of crashing a worker must run alone."""
    ENCODERS = enum.auto()
    """The encoder budget or the encoder cache is used up."""
    BLOCKS = enum.auto()
    """Too few KV-cache blocks are free."""
    DELAY = enum.auto()
    """Admission is delayed to compute prompts together."""
    PARTIAL_PREFILLS = enum.auto()
    """The maximum number of prompts is being computed in chunks."""
