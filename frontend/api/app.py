"""The ASGI application: all routes and the middleware around them."""

from __future__ import annotations

import asyncio
from types import ModuleType

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.access import Access, Origins, is_open
from ..http.middleware import add_middleware
from ..http.routing import Router
from ..observability.metrics.load_reports import LoadReports
from ..observability.tracing.middleware import Tracing
from .durable.recovery import Recovery
from .edge import Edge, ErrorBody
from .route_tables.first import FirstRoutes
from .serving import Serving


class App:
    """The ASGI application.

    It begins with the first routes, and adds the others with the first request to one of them, or when the server is
    ready. So the server is ready sooner.

    Args:
        serving: The state that the endpoints share.
        is_loopback: True if the server listens on a loopback address.

    Attributes:
        asgi: The application with all middleware.
        recovery: The tasks that continue requests of frontends that have exited.
    """

    def __init__(self, serving: Serving, *, is_loopback: bool) -> None:
        self._serving = serving
        frontend = serving.config.frontend
        self._first = FirstRoutes(serving)
        self._router = serving.router = Router(self._first.routes)
        self._error_bodies: dict[str, ErrorBody] = {}
        self._loading: asyncio.Task[None] | None = None
        self.recovery = Recovery(serving, self._router)
        access = Access(frontend, is_loopback=is_loopback)
        edge: ASGIApp = Edge(
            self._router,
            access,
            frontend.root_path,
            self._error_bodies,
            lambda: serving.is_open,
            lambda path: any(self._router.find(path)),
        )
        edge = LoadReports(edge, serving.engine.metrics.read_load)
        if serving.tracer is not None:
            edge = Tracing(edge, serving.tracer)
        self._edge = add_middleware(edge, frontend.middleware)
        serving.app = self._answer
        self.asgi: ASGIApp = Origins(self._answer, frontend, is_loopback=is_loopback)

    async def load_routes(self) -> None:
        """Add the routes that are not there from the beginning, once."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_routes())
        await asyncio.shield(self._loading)

    async def _load_routes(self) -> None:
        others = await asyncio.to_thread(_import_others)
        self._error_bodies |= others.ERROR_BODIES
        self._router.add(others.make_routes(self._serving, self._first))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope)
        if scope.get("method") == "POST" and not is_open(path, "POST"):
            await self._serving.wait_for_start()
        if self._loading is None or not self._loading.done():
            routes = self._router.find(path)
            if not any(found.route.takes(scope.get("method", "GET")) for found in routes):
                await self.load_routes()
        await self._edge(scope, receive, send)


def _import_others() -> ModuleType:
    # Late imports, because they take a third of the time of all imports of a frontend.
    from ..observability.metrics import exposition  # noqa: F401 - the first scrape needs it
    from .route_tables import others

    return others
