"""Refuse requests that are malformed, that cannot fit, or for which the queue has no room."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.messages import EngineCoreRequest, FinishedRequest, FinishReason
from .client_outputs import ClientOutputs
from .limits import Refusal, Requirements
from .queues.backlog import AdmissionRate, TenantLimits


class Refusals:
    """Checks new requests. For one that is refused, it gives the reason and the time after which to retry."""

    def __init__(
        self,
        requirements: Requirements,
        clients: ClientOutputs,
        tenants: TenantLimits | None,
        rate: AdmissionRate,
    ) -> None:
        self.on_refusal: Callable[[EngineCoreRequest], None] = lambda message: None
        """Called with each request that is refused."""
        self._requirements = requirements
        self._clients = clients
        self._tenants = tenants
        self._rate = rate

    def refuse(
        self,
        client_index: int,
        message: EngineCoreRequest,
        num_queued_reqs: int,
        num_queued_tokens: int,
    ) -> bool:
        """Refuse a request if there is a reason. Return whether there is one."""
        tenants = self._tenants
        num_of_tenant = (
            0 if tenants is None else tenants.count_queued(message.tenant, num_queued_reqs)
        )
        try:
            refusal = self._requirements.find_refusal(
                message, num_queued_reqs, num_queued_tokens, num_of_tenant
            )
        except Exception as error:
            # No state has changed yet, so only this request fails.
            refusal = Refusal(FinishReason.ERROR, f"the request is malformed: {error!r}")
        if refusal is None:
            return False
        reason, text = refusal
        retry_after_s = 0.0
        if reason is FinishReason.REJECTED:
            retry_after_s = self._rate.estimate_seconds(num_queued_reqs)
        elif reason is FinishReason.THROTTLED and tenants is not None:
            retry_after_s = tenants.estimate_seconds(message.tenant, num_of_tenant)
        finished = FinishedRequest(
            message.request_index,
            reason,
            message=text,
            retry_after_s=retry_after_s,
            trace_headers=message.trace_headers,
        )
        self._clients.finish_request(client_index, finished)
        self.on_refusal(message)
        return True
