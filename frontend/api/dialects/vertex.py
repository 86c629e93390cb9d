"""Google's Vertex AI, whose containers have one route for predictions: each instance is the body of another route.

Vertex AI names the routes and the port of a container in environment variables
(https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements). As in llama.cpp, an instance names
its route in `@requestFormat`; otherwise its fields do. As in SGLang, `parameters` apply to all instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...http.access import vertex_path
from ...http.errors import bad_request, echo, json_response
from ...http.routing import Route
from ..batches.internal_call import call_route
from ..bodies.disconnection import while_connected
from ..bodies.intake import Intake, RouteHandlers, reads
from ..logprobs import Json
from ..routes.management import Management
from ..schema.dialects.vertex import PredictRequest
from ..serving import Serving

MAX_INSTANCES: Final = 128
"""Maximum number of instances in one body, as in llama.cpp."""

FORMAT: Final = "@requestFormat"

_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/generate",
    "/completion",
    "/infill",
    "/embedding",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)
"""The routes that instances may name. None of them is for operators."""

_BY_FIELD: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "text": "/generate",
    "input_ids": "/generate",
    "query": "/v1/rerank",
    "input": "/v1/embeddings",
}
"""Field of an instance without a format -> its route."""

_IDENTITY: Final = ("owner", "tenant", "cache_owner")


def _alias(path: str) -> str:
    """Return llama.cpp's name of a route: `chatCompletions` for `/v1/chat/completions`."""
    first, *others = path.removeprefix("/v1").lstrip("/").replace("-", "/").split("/")
    return first + "".join(map(str.capitalize, others))


_FORMATS: Final = {_alias(path): path for path in _PATHS} | {path: path for path in _PATHS}


class Predictions(RouteHandlers):
    """The route for predictions."""

    @reads(PredictRequest)
    async def predict(self, http: Request, body: PredictRequest, size: int) -> Response:
        """Return the answer to each instance; an instance that fails has its error.

        Raises:
            APIError: There are no instances, or too many (400).
        """
        if body.instances is None or len(body.instances) > MAX_INSTANCES:
            count = "none" if body.instances is None else len(body.instances)
            raise bad_request("instances", f"must be at most {MAX_INSTANCES} objects, got {count}")
        state = http.scope["state"]
        identity = {name: state[name] for name in _IDENTITY if name in state}
        answers = [
            self._answer(instance, body.parameters or {}, identity, f"instances[{i}]")
            for i, instance in enumerate(body.instances)
        ]
        predictions = await while_connected(http.receive, _all(answers))
        return json_response({"predictions": predictions})

    async def _answer(
        self, instance: Any, parameters: Json, identity: Mapping[str, Any], where: str
    ) -> Any:
        if not isinstance(instance, dict):
            return bad_request(where, f"must be an object, got {echo(instance)}").body
        fields = parameters | instance
        name = fields.pop(FORMAT, None)
        path = next((p for field, p in _BY_FIELD.items() if name is None and field in fields), None)
        if isinstance(name, str):
            path = _FORMATS.get(name)
        if path is None:
            choices = ", ".join(map(_alias, _PATHS))
            problem = f"must be one of {choices}, got {echo(name)}"
            return bad_request(f"{where}.{FORMAT}", problem).body
        if "stream" in fields:
            fields["stream"] = False
        assert self._serving.router is not None
        encoded = msgspec.json.encode(fields)
        result = await call_route(self._serving.router, path, encoded, identity)
        return msgspec.Raw(result.body)


async def _all(answers: list[Any]) -> list[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer) for answer in answers]
    return [task.result() for task in tasks]


def vertex_routes(serving: Serving, intake: Intake, management: Management) -> list[Route]:
    """Return the routes for predictions, and the health route that Vertex AI has chosen, if it is another one."""
    predictions = Predictions(serving, intake)
    routes = [Route(path, predictions.predict) for path in ("/predict", "/vertex_generate")]
    # The paths that Vertex AI has chosen are not in the description of the API.
    if path := vertex_path("AIP_PREDICT_ROUTE"):
        routes.append(Route(path, predictions.predict, in_schema=False))
    if path := vertex_path("AIP_HEALTH_ROUTE"):
        routes.append(Route(path, management.health, in_schema=False))
    return routes
