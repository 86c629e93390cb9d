"""Simulate prefill replicas, which compute prompts for decode replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ....protocol.config import KVTransferConfig
from ....protocol.messages import EngineCoreRequest
from ....protocol.sampling_params import SamplingParams
from ....protocol.worker_messages import SchedulerOutput
from ...kv_cache.connector import ExternalMatch, KVConnector
from ...replay.recorder import Setup
from ...state.request import Request

TRANSFER: Final = KVTransferConfig("simulated")
_COMPUTED: Final[dict[str, object]] = {"do_remote_prefill": True}


class PrefillReplicas(NamedTuple):
    """The prefill replicas of a fleet.

    Attributes:
        num_replicas: Their number; 0 if every replica computes its own prompts.
        min_tokens: Uncached prompt tokens from which they compute a prompt.
        seconds_per_token: The time in which the keys and values of a prompt token reach the decode replica, after the
            prompt has been computed.
    """

    num_replicas: int = 0
    min_tokens: int = 256
    seconds_per_token: float = 0.0


class SimulatedTransfer(KVConnector):
    """The connector of a decode replica. It loads all of a prompt that was computed elsewhere but the last token."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return the tokens that are not cached, except the last one."""
        if not request.kv_transfer_params:
            return ExternalMatch(0)
        return ExternalMatch(max(request.num_prompt_tokens - 1 - num_computed_tokens, 0))

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Do nothing: the blocks have arrived."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return nothing, because there are no workers."""
        return b""


def decode_setup(setup: Setup) -> Setup:
    """Return the setup of a decode replica."""
    return msgspec.structs.replace(setup, kv_transfer=TRANSFER)


def prefill_request(message: EngineCoreRequest, request_index: int) -> EngineCoreRequest:
    """Return the request with which a prefill replica computes a prompt."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return msgspec.structs.replace(message, request_index=request_index, sampling_params=params)


def decode_request(message: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request to a decode replica after its prompt was computed."""
    return msgspec.structs.replace(message, kv_transfer_params=_COMPUTED)
