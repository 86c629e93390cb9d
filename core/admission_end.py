"""Why a step admitted no further request."""

from __future__ import annotations

import enum


class AdmissionEnd(enum.Enum):
    """The value says why a waiting request was left waiting."""

    ALL_ADMITTED = "held back as a long prompt, beyond max_long_partial_prefills"
    PREEMPTION = "no admission in a step that preempts"
    SEQUENCES = "max_num_seqs requests were running"
    TOKENS = "the step was full: max_num_batched_tokens"
    MESSAGE = "the step was full: as many tokens as go to the workers at once"
    QUARANTINE = "a suspect of having killed a worker is tried alone"
    BLOCKS = "not enough free KV-cache blocks"
    DELAY = "held back by scheduler_delay_factor"
    PARTIAL_PREFILLS = "max_num_partial_prefills prompts were being computed"
