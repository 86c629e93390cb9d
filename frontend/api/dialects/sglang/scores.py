"""SGLang's scores of items by labels. They share their route with the scores of pairs of texts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ....client.engine_client import Delta
from ....http.routing import Asgi
from ...bodies.intake import Intake, RouteHandlers
from ...durable.records import replay_body
from ...logprobs import Json
from ...routes.invocations import field_names
from ...routes.scores import Scores
from ...schema import ScoreRequest
from ...schema.vllm import GenerativeScoringRequest
from ...serving import Serving
from ..vllm.scoring import GenerativeScoring, ScoringAnswer


class ScoreRoute(RouteHandlers):
    """The route `/v1/score`. A body with `label_token_ids` has SGLang's format."""

    body_schema = ScoreRequest | GenerativeScoringRequest

    def __init__(self, serving: Serving, intake: Intake, scores: Scores) -> None:
        super().__init__(serving, intake)
        self._scores = scores
        self._by_labels = SglangScoring(serving, intake)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Score items by labels, or pairs of texts."""
        body = await self._intake.receive_bytes(Asgi(scope, receive, send))
        names = await self._serving.executor.run(len(body), field_names, body)
        again = replay_body(body, receive)
        if "label_token_ids" in names:
            await self._by_labels(scope, again, send)
            return
        response = await self._scores.score(Request(scope, again))
        await response(scope, receive, send)


class _SglangScores(ScoringAnswer):
    def whole(self, outputs: list[Delta]) -> Json:
        return {
            "scores": [self.scores(output) for output in outputs],
            "model": self.envelope["model"],
            "usage": self._count_usage(num_completion_tokens=0),
            "object": "scoring",
        }


class SglangScoring(GenerativeScoring):
    """The endpoint that scores items by labels, in SGLang's format."""

    applies_softmax = False
    answer_type = _SglangScores
