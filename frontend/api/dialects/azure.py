"""Azure's OpenAI service, whose paths name the model: https://learn.microsoft.com/azure/ai-services/openai/reference."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from starlette._utils import get_route_path
from starlette.types import Scope

from ...http.access import DEPLOYMENTS
from ...http.routing import Route

PATHS: Final = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/audio/transcriptions",
    "/audio/translations",
)
"""The routes of OpenAI's API that Azure has below a deployment. A path that ends another one is after it."""

_PATH: Final = re.compile(rf"{DEPLOYMENTS}(.+?)(?:{'|'.join(PATHS)})")


def find_deployment(scope: Scope) -> str:
    """Return the model that the path of a request names; "" if it is none of Azure's paths."""
    path = get_route_path(scope)
    # The path of a recorded request has not been parsed by the router.
    match = _PATH.fullmatch(path) if path.startswith(DEPLOYMENTS) else None
    return "" if match is None else match[1]


def deployment_routes(routes: Iterable[Route]) -> list[Route]:
    """Return Azure's routes, whose endpoints are those of OpenAI's routes."""
    endpoints = {r.path: r.endpoint for r in routes if "POST" in (r.methods or ())}
    return [Route(f"{DEPLOYMENTS}{{model:path}}{path}", endpoints[path]) for path in PATHS]
