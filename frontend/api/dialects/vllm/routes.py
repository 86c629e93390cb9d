"""The routes of vLLM's own API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....http.errors import bad_request, json_response
from ....http.routing import Route
from ...bodies.intake import Intake, RouteHandlers, reads
from ...control.pause import Pauses
from ...control.sleep import Sleep
from ...control.weights import Weights
from ...schema.vllm import VllmAbortRequest
from ...serving import Serving
from ..sglang.operations import abort
from .generate import VllmGenerate
from .scoring import GenerativeScoring


class VllmAborts(RouteHandlers):
    """The route that aborts requests by their IDs."""

    @reads(VllmAbortRequest)
    async def abort(self, http: Request, body: VllmAbortRequest, size: int) -> Response:
        """Abort the requests with these IDs. IDs of no request have no effect."""
        if not body.request_ids:
            raise bad_request("request_ids", "must be an array of at least one ID")
        counts = [await abort(self._serving, each) for each in set(body.request_ids) if each]
        return json_response({"aborted": sum(counts)})


def routes(serving: Serving, intake: Intake, weights: Weights) -> list[Route]:
    """Return all routes."""
    pauses, sleep = Pauses(serving, intake), Sleep(serving, intake)
    return [
        Route("/pause", pauses.pause, methods=["POST"]),
        Route("/resume", pauses.resume, methods=["POST"]),
        Route("/is_paused", pauses.is_paused),
        Route("/sleep", sleep.sleep, methods=["POST"]),
        Route("/release_kv_cache_memory", sleep.release_kv_cache, methods=["POST"]),
        Route("/wake_up", sleep.wake_up, methods=["POST"]),
        Route("/is_sleeping", sleep.is_sleeping),
        Route("/collective_rpc", weights.call_like_vllm),
        Route("/generative_scoring", GenerativeScoring(serving, intake)),
        Route("/inference/v1/generate", VllmGenerate(serving, intake)),
        Route("/inference/v1/abort_requests", VllmAborts(serving, intake).abort),
    ]
