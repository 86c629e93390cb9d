"""Routes by path and method. A path without parameters is found in a table, so their number costs nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

_PARAMETER: Final = re.compile(r"\{(\w+)(:path)?\}")


class Asgi(NamedTuple):
    """An HTTP request, as ASGI passes it to an application."""

    scope: Scope
    receive: Receive
    send: Send

    @property
    def state(self) -> dict[str, Any]:
        """The state of the request."""
        state: dict[str, Any] = self.scope["state"]
        return state


class Route:
    """A path, the methods that it takes, and the endpoint that answers.

    A function or method gets a `Request` and returns the response. Another endpoint is an ASGI application. Unless
    `methods` are given, an endpoint with a `body_schema` answers POST, and any other function answers GET. `{name}` in
    a path is any text without a slash, and `{name:path}` any text. Routes that are not `in_schema` are not described
    in `/openapi.json`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Any,
        methods: Iterable[str] | None = None,
        *,
        in_schema: bool = True,
    ) -> None:
        self.path, self.endpoint, self.in_schema = path, endpoint, in_schema
        is_function = inspect.isfunction(endpoint) or inspect.ismethod(endpoint)
        if methods is None and hasattr(endpoint, "body_schema"):
            methods = ("POST",)
        elif methods is None and is_function:
            methods = ("GET",)
        self.methods = None if methods is None else frozenset(methods)
        if self.methods is not None and "GET" in self.methods:
            self.methods |= {"HEAD"}
        self.app: ASGIApp = _answering(endpoint) if is_function else endpoint
        self.prefix = path.partition("{")[0]

    @property
    def has_parameters(self) -> bool:
        """True if the path has parameters."""
        return self.prefix != self.path

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return [name for name, _ in _PARAMETER.findall(self.path)]

    @property
    def template(self) -> str:
        """The path with each parameter as `{name}`."""
        return _PARAMETER.sub(r"{\1}", self.path)

    def takes(self, method: str) -> bool:
        """Return whether the route has a method."""
        return self.methods is None or method in self.methods

    def match(self, path: str) -> dict[str, str] | None:
        """Return the parameters in a path; None if it is another route's."""
        if not self.has_parameters:
            return {} if path == self.path else None
        if not path.startswith(self.prefix):
            return None
        found = self._pattern.fullmatch(path)
        return None if found is None else found.groupdict()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text, end = "", 0
        for parameter in _PARAMETER.finditer(self.path):
            name, kind = parameter.groups()
            text += re.escape(self.path[end : parameter.start()])
            text += f"(?P<{name}>{'.*' if kind else '[^/]+'})"
            end = parameter.end()
        return re.compile(text + re.escape(self.path[end:]))


def with_v1(routes: Iterable[Route]) -> list[Route]:
    """Return each route with and without /v1, which some clients include in their base URL."""
    return [
        Route(prefix + route.path, route.endpoint, methods=route.methods)
        for prefix in ("/v1", "")
        for route in routes
    ]


def _answering(function: Callable[[Request], Awaitable[ASGIApp]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await function(Request(scope, receive, send))
        await response(scope, receive, send)

    return app


class Found(NamedTuple):
    """A route, and the parameters in the path of a request."""

    route: Route
    parameters: dict[str, str]


class Router:
    """The ASGI application that calls the first route with the path and the method of a request.

    A path without parameters is found before all others. If only the method is wrong, the answer is 405. `routes` has
    all routes.
    """

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self.routes: list[Route] = []
        self._exact: dict[str, list[Route]] = {}
        self._others: list[Route] = []
        self.add(routes)

    def add(self, routes: Iterable[Route]) -> None:
        """Add routes after those that there are."""
        for route in routes:
            self.routes.append(route)
            if route.has_parameters:
                self._others.append(route)
            else:
                self._exact.setdefault(route.path, []).append(route)

    def find(self, path: str) -> Iterator[Found]:
        """Yield the routes of a path, with any method."""
        for route in self._exact.get(path, ()):
            yield Found(route, {})
        for route in self._others:
            if (parameters := route.match(path)) is not None:
                yield Found(route, parameters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            HTTPException: There is no such route (404), or it has another method (405).
        """
        others: Route | None = None
        for route, parameters in self.find(get_route_path(scope)):
            if route.takes(scope["method"]):
                scope["route"] = route
                scope["endpoint"] = route.endpoint
                scope["path_params"] = parameters
                await route.app(scope, receive, send)
                return
            others = others or route
        if others is None:
            raise HTTPException(404)
        raise HTTPException(405, headers={"Allow": ", ".join(sorted(others.methods or ()))})
