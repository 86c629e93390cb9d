"""Put the operator's own ASGI middleware around the application."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.types import ASGIApp

from ...protocol.errors import ConfigError


def add_middleware(app: ASGIApp, names: Sequence[str]) -> ASGIApp:
    """Return `app` inside the middleware of `--middleware`; the first name is the outermost.

    As in vLLM, a class takes the application as its argument, and an async function takes a request and the function
    that answers it.

    Raises:
        ConfigError: A name cannot be imported, or is neither a class nor an async function.
    """
    for name in reversed(names):
        module, _, attribute = name.rpartition(".")
        try:
            found: Any = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"--middleware {name} cannot be imported: {error}") from error
        if inspect.isclass(found):
            middleware = cast("Callable[[ASGIApp], ASGIApp]", found)
            app = middleware(app)
        elif inspect.iscoroutinefunction(found):
            # A late import, because few servers have such a function.
            from starlette.middleware.base import BaseHTTPMiddleware

            app = BaseHTTPMiddleware(app, dispatch=found)
        else:
            raise ConfigError(
                f"--middleware {name} must be an ASGI class or an async function of a request, got "
                f"{type(found).__name__}"
            )
    return app
