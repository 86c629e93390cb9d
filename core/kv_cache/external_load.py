"""Asynchronous loads of a KV connector, which may be held back or in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..state.request import Request


class ExternalLoad(NamedTuple):
    """An asynchronous load of the last `num_external` tokens of a prefix of `num_tokens` tokens.

    A `BlockConnector` loads the contents named by `keys` into `blocks`. Other connectors choose the contents
    themselves.
    """

    request: Request
    num_external: int
    num_tokens: int
    keys: Sequence[bytes] = ()
    blocks: Sequence[int] = ()


class HeldLoad(NamedTuple):
    """An asynchronous load that may not start before the output of step `last_step` has arrived."""

    load: ExternalLoad
    last_step: int
    invalid_blocks: set[int]


class LoadInProgress(NamedTuple):
    """An asynchronous load in progress, and the blocks that could not be loaded so far."""

    load: ExternalLoad
    invalid_blocks: set[int]
