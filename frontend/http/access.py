"""Access control: API keys, operator routes, and requests from web pages."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import time
from typing import Final

from starlette._utils import get_route_path
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...protocol.config import FrontendConfig
from .client_secrets import PREFIX, is_valid_secret
from .errors import APIError, echo
from .websocket import KEY_SUBPROTOCOL, OFFER, read_subprotocols

WEB_PATHS: Final = ("/", "/web/app.js", "/web/app.css", "/web/icon.svg")
"""Routes of the web page, which need no API key: the page contains no data and asks the user for the key."""

OPEN_PATHS: Final = frozenset(
    {
        *WEB_PATHS,
        *(
            "/health",
            "/v1/health",
            "/health_generate",
            "/livez",
            "/readyz",
            "/ready",
            "/ping",
            "/metrics",
            "/version",
            "/openapi.json",
            "/docs",
        ),
    }
)
"""Routes that need no API key."""

OPERATOR_PATHS: Final = frozenset(
    {
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/flush_cache",
        "/abort_request",
        "/pause",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/destroy_weights_update_group",
        "/get_weights_by_name",
        "/update_weight_version",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/adapters",
        "/collective_rpc",
        "/resume",
        "/pause_generation",
        "/continue_generation",
        "/inference/v1/abort_requests",
        "/debug/dump",
        "/debug/kv-cache",
        "/debug/requests",
        "/lora-adapters",
        "/api/copy",
        "/api/delete",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Operator routes, in addition to those below `_OPERATOR_PREFIXES`."""
GET_OPERATIONS: Final = frozenset({"/flush_cache"})
"""Operator routes that also act on GET, which trainers such as slime send."""
REPLICA_COMMANDS: Final = "/replicas/"
TIMELINES: Final = "/debug/requests/"
_OPERATOR_PREFIXES: Final = (REPLICA_COMMANDS, TIMELINES, "/slots/", "/adapters/")

OLLAMA_PATHS: Final = "/api/"
"""Prefix of Ollama's routes. Its clients, such as curl in Ollama's documentation, often send no content type."""

FORM_PATHS: Final = (
    "/audio/transcriptions",
    "/audio/translations",
    "/files",
    "/inference",
    "/parts",
)
"""Suffixes of the routes whose request bodies are forms with a file."""
SPEECH_PATHS: Final = FORM_PATHS[:2]
"""Suffixes of those that also accept JSON, with the URL of a file."""

SECRET_PATHS: Final = ("/v1/realtime", "/realtime")
"""Routes that accept client secrets."""

LOCAL_PAGES: Final = r"https?://(localhost|[\w-]+\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?"
"""Pattern of the origins of web pages that a server on this machine provides."""

ADMIN_TENANT: Final = "admin"
"""The tenant of requests with the key of `--admin-api-key`."""
OWNER_CHARACTERS: Final = 32
"""Length of an owner's name in the store, in hexadecimal digits."""

_FORM: Final = "multipart/form-data"
_JSON: Final = "application/json"
_KEY_HEADERS: Final = (b"x-api-key", b"x-goog-api-key", b"api-key")

_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def vertex_path(variable: str) -> str:
    """Return the path that an environment variable of Vertex AI has, with its slash; "" if there is none."""
    path = os.environ.get(variable, "").strip("/")
    return f"/{path}" if path else ""


def is_open(path: str, method: str) -> bool:
    """Return whether a route needs no API key. The web page is at the same path as a route of TGI."""
    if path in OPEN_PATHS:
        return not (path == "/" and method == "POST")
    return method == "GET" and path == vertex_path("AIP_HEALTH_ROUTE")


class Access:
    """Decides from the headers of a request whether it is allowed.

    With several API keys, each key is a tenant: the state's `tenant` is "key 1" for the first. `cache_owner` differs
    between keys unless they share the prefix cache. `owner` identifies the key in the store. It is derived from the key
    and not from the key's position, because stored objects outlive the server; without keys it is "".

    Any web page can make a browser send requests to this server. So a body must have the content type JSON, which
    browsers send for a page only if the server allows the page's origin. Requests of Ollama's API that no browser sent
    may have any content type. Operator routes allow only the origin of the server's own web page.

    A server on a loopback address without keys also rejects other host names in the Host header. Otherwise a page could
    make its own host name resolve to that address (DNS rebinding).
    """

    def __init__(self, config: FrontendConfig, *, is_loopback: bool) -> None:
        keys = config.api_keys
        self._keys = [digest_of(key.encode()) for key in keys]
        self._admin_key = digest_of(config.admin_api_key.encode()) if config.admin_api_key else None
        num_owners = len(keys) + (self._admin_key is not None)
        self._has_owners = bool(keys) and num_owners > 1 and not config.share_prefix_cache
        self._hosts: frozenset[str] | None = None
        if "*" not in config.allowed_hosts and (config.allowed_hosts or (is_loopback and not keys)):
            self._hosts = frozenset(host.lower() for host in (*config.allowed_hosts, config.host))

    def check(self, scope: Scope) -> None:
        """Authorize a request, and set the tenant, the owner and the cache owner in its state.

        Raises:
            APIError: The request is not allowed (401, 403) or has the wrong content type (415).
        """
        path = get_route_path(scope)
        headers = dict(scope["headers"])
        self._check_host(headers.get(b"host"))
        if not is_open(path, scope.get("method", "GET")):
            digest = self._digest_of(key_of(headers), path)
            self._authorize(scope, digest, is_operator_path(path))
            if is_operator_path(path) and b"origin" in headers and not self._is_own_page(headers):
                raise _forbidden(
                    "Web pages from other servers may not call this route: the request has the header "
                    f"Origin {echo(headers[b'origin'].decode('latin-1'))}; send it without one"
                )
            if path in GET_OPERATIONS and scope["method"] in _WITHOUT_BODY:
                _check_is_program(headers)
            is_checked = _is_of_browser(headers) or not path.startswith(OLLAMA_PATHS)
            if is_checked and scope["method"] not in _WITHOUT_BODY:
                is_form = path.endswith(FORM_PATHS)
                accepts_json = not is_form or path.endswith(SPEECH_PATHS)
                _check_media_type(headers, is_form, accepts_json)

    def _check_host(self, header: bytes | None) -> None:
        """Raise APIError 403 for an unknown host name.

        IP addresses are allowed, because DNS rebinding needs a host name.
        """
        if self._hosts is None or header is None:
            return
        host = _host_name(header.decode("latin-1"))
        if host in self._hosts or host == "localhost" or host.endswith(".localhost"):
            return
        if not _is_address(host):
            raise _forbidden(
                f"The header Host {echo(host)} does not name this server; use its address, "
                "or start it with --allowed-hosts NAME"
            )

    def _is_own_page(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether a request comes from this server's own web page.

        The Origin header of such a request names the same host as its Host header. The same holds for a page with DNS
        rebinding, but that page has no API key, and its host is a name and not an address.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        name = _host_name(host)
        is_checked = bool(self._keys or self._admin_key) or self._hosts is not None
        if not is_checked and name != "localhost" and not _is_address(name):
            return False
        origin = headers[b"origin"].decode("latin-1").lower()
        return (
            headers.get(b"sec-fetch-site") == b"same-origin"
            or origin.partition("://")[2] == host.lower()
        )

    def _digest_of(self, key: bytes, path: str) -> bytes:
        """Return the digest of a key; of a valid client secret, that of the key that signed it."""
        if key.startswith(PREFIX) and path in SECRET_PATHS:
            now = time.time()
            for digest in filter(None, (*self._keys, self._admin_key)):
                if is_valid_secret(key, digest, now):
                    return digest
        return digest_of(key)

    def _authorize(self, scope: Scope, digest: bytes, is_for_operators: bool) -> None:
        if not self._keys and not (self._admin_key is not None and is_for_operators):
            return
        # Compare with every key in constant time, so that the response time reveals nothing about the keys.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        is_admin = self._admin_key is not None and hmac.compare_digest(digest, self._admin_key)
        if not is_admin and not any(matches):
            raise APIError(
                401,
                "Incorrect or missing API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if is_for_operators and not is_admin and (self._admin_key or len(self._keys) > 1):
            raise _forbidden(
                "This route is for operators only: "
                + (
                    "send the key of --admin-api-key"
                    if self._admin_key
                    else "a server with several API keys needs --admin-api-key KEY for them"
                )
            )
        state = scope["state"]
        state["owner"] = digest.hex()[:OWNER_CHARACTERS]
        if is_admin:
            state["tenant"] = ADMIN_TENANT
        elif len(matches) > 1:
            state["tenant"] = f"key {matches.index(True) + 1}"
        if self._has_owners:
            state["cache_owner"] = digest


class Origins(CORSMiddleware):
    """ASGI middleware that allows web pages from the allowed origins to call the server, except its operator routes.

    `auto` allows every origin; if the server listens on a loopback address, only pages from this machine, as
    `localhost` does everywhere.
    """

    def __init__(self, app: ASGIApp, config: FrontendConfig, *, is_loopback: bool) -> None:
        origins = config.allowed_origins
        if origins == ("auto",):
            origins = ("localhost" if is_loopback else "*",)
        allows_local = "localhost" in origins
        super().__init__(
            app,
            allow_origins=[each for each in origins if each != "localhost"],
            allow_origin_regex=LOCAL_PAGES if allows_local else None,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id"],
        )
        self._root_path = config.root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with CORS headers unless it is for an operator route."""
        normalize_path(scope, self._root_path)
        path = get_route_path(scope)
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
        is_unasked = path.endswith(FORM_PATHS) or scope.get("state", {}).get(OFFER, False)
        if is_unasked and origin and not self.is_allowed_origin(origin):
            # Browsers send forms and open WebSockets without a preflight request, so the origin must be checked here.
            error = _forbidden(f"Web pages of {echo(origin)} may not call this server")
            await error.response()(scope, receive, send)
        elif is_operator_path(path):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


_PREFIX: Final = "/openai"
"""The prefix of the routes of OpenAI's API in the clients of Groq and Azure."""

DEPLOYMENTS: Final = f"{_PREFIX}/deployments/"
"""The prefix of the routes with which Azure's clients name the model in the path."""


def normalize_path(scope: Scope, root_path: str) -> None:
    """Remove a slash at the end of the path, which clients often add, and the prefix of Groq's and Azure's clients."""
    scope["root_path"] = root_path
    path = scope["path"].removesuffix("/") or "/"
    route = path.removeprefix(root_path)
    is_prefixed = route.startswith(f"{_PREFIX}/") and not route.startswith(DEPLOYMENTS)
    scope["path"] = route.removeprefix(_PREFIX) if is_prefixed else path


def is_operator_path(path: str) -> bool:
    """Return whether the route changes the server's behavior for all clients."""
    return path in OPERATOR_PATHS or path.startswith(_OPERATOR_PREFIXES)


def _forbidden(message: str) -> APIError:
    return APIError(403, message, type="permission_error")


def _check_is_program(headers: dict[bytes, bytes]) -> None:
    """Raise APIError 403 for a request of a browser, which any page can make send a GET without an Origin header."""
    # They send Sec-Fetch-Site to trustworthy addresses only, which an address in a network without TLS is not.
    if _is_of_browser(headers) or headers.get(b"user-agent", b"").startswith(b"Mozilla/"):
        raise _forbidden("Browsers may call this route only by POST")


def _is_of_browser(headers: dict[bytes, bytes]) -> bool:
    """Return whether a browser may have sent a request for a web page.

    Browsers add one of these headers to every POST.
    """
    return b"origin" in headers or b"sec-fetch-site" in headers


def _check_media_type(headers: dict[bytes, bytes], is_form: bool, accepts_json: bool) -> None:
    """Raise APIError 415 for a body that is neither a form where that `is_form`, nor JSON where the route accepts it.

    Browsers let pages send JSON only with permission.
    """
    if b"transfer-encoding" not in headers and int(headers.get(b"content-length", b"0")) == 0:
        return
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    wanted = _FORM if is_form else _JSON
    if kind != wanted and not (accepts_json and kind == _JSON):
        raise APIError(415, f"the request body needs Content-Type {wanted}, got {echo(given)}")


def _host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case, without brackets, port and final dot."""
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?", header.strip())
    return header if match is None else (match[1] or match[2] or "").lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def digest_of(key: bytes) -> bytes:
    """Return the digest of an API key, which identifies it."""
    return hashlib.sha256(b"engine.api-key:" + key).digest()


def key_of(headers: dict[bytes, bytes]) -> bytes:
    """Return the API key. Clients of Anthropic, Google and Azure and web pages send it in headers of their own."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    for name in read_subprotocols(headers):
        if name.startswith(KEY_SUBPROTOCOL):
            return name.removeprefix(KEY_SUBPROTOCOL).encode("latin-1")
    return next((headers[name] for name in _KEY_HEADERS if name in headers), b"").strip()
