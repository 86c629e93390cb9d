"""Access to routes by web pages, tenants and operators, and to the prefix caches of tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.protocol.messages import AddRequests
from engine.protocol.supervisor_messages import Stage
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
PROMPT = "one two three four five six seven eight nine ten " * 4
OPERATORS = ("/reset_prefix_cache", "/debug/dump", "/replicas/0/drain")
PAGE = {"origin": "http://page.example"}


@pytest.fixture(scope="module")
def local() -> Iterator[FrontendProcess]:
    """A frontend that listens on 127.0.0.1 without API keys, as on a laptop."""
    with FrontendProcess(step_s=0.0005) as process:
        yield process
        assert process.stop() == 0, process.log


@pytest.fixture(scope="module")
def tenants() -> Iterator[FrontendProcess]:
    with FrontendProcess(
        step_s=0.0005, api_keys=("first", "second"), admin_api_key="operator"
    ) as process:
        yield process
        assert process.stop() == 0, process.log


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/", *OPERATORS]
)
def test_bodies_that_a_page_may_send_without_preflight_are_rejected(
    local: FrontendProcess, path: str, media_type: str
) -> None:
    response = local.http.post(
        path, content=b'{"prompt": "x"}', headers={**PAGE, "content-type": media_type}
    )
    assert response.status_code in (403, 415)
    message = response.json()["error"]["message"]
    assert "application/json" in message or "http://page.example" in message


def test_ollama_clients_need_no_content_type_but_pages_do(local: FrontendProcess) -> None:
    body = b'{"model": "echo", "prompt": "x", "stream": false, "options": {"num_predict": 1}}'
    for media_type in ("", "application/x-www-form-urlencoded"):
        headers = {"content-type": media_type}
        answer = local.http.post("/api/generate", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        for mark in (PAGE, {"sec-fetch-site": "cross-site"}):
            refused = local.http.post("/api/generate", content=body, headers=headers | mark)
            assert refused.status_code in (403, 415)


def test_json_may_name_its_charset(local: FrontendProcess) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert local.http.post(COMPLETIONS, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", [*OPERATORS, "/reset_prefix_cache/"])
def test_web_pages_cannot_use_operator_routes(local: FrontendProcess, path: str) -> None:
    preflight = local.http.options(path, headers={**PAGE, "access-control-request-method": "POST"})
    local_page = {"origin": f"http://127.0.0.1:{local.port + 1}"}
    for response in (
        preflight,
        local.http.post(path, headers=PAGE),
        local.http.post(path, headers=local_page, json={}),
    ):
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    own_page = {"origin": f"http://127.0.0.1:{local.port}"}
    assert local.http.post("/reset_prefix_cache", headers=own_page).status_code == 200
    assert local.http.post("/reset_prefix_cache").status_code == 200


def test_only_pages_of_this_machine_may_generate_on_a_loopback_address(
    local: FrontendProcess,
) -> None:
    asked = {"access-control-request-method": "POST"}
    for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "https://[::1]:1"):
        response = local.http.options(COMPLETIONS, headers={"origin": origin, **asked})
        assert response.headers["access-control-allow-origin"] == origin
    for origin in ("http://page.example", "http://localhost.page.example", "null"):
        response = local.http.options(COMPLETIONS, headers={"origin": origin, **asked})
        assert "access-control-allow-origin" not in response.headers


def test_a_rebound_host_name_is_rejected(
    local: FrontendProcess,
) -> None:
    for host in (
        "page.example",
        "page.example:8000",
        "localhost.page.example",
        "127.0.0.1.example",
    ):
        for path in ("/v1/models", "/metrics"):
            response = local.http.get(path, headers={"host": host})
            assert response.status_code == 403 and "--allowed-hosts" in response.text
    for host in (
        "localhost:8000",
        "LOCALHOST",
        "a.localhost",
        "127.0.0.1",
        "[::1]:8000",
        "10.0.0.7:80",
    ):
        assert local.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_other_host_names_are_allowed_by_flag_or_with_api_keys() -> None:
    with FrontendProcess(allowed_hosts=("llm.example",)) as frontend:
        assert frontend.http.get("/version", headers={"host": "LLM.example:80"}).status_code == 200
        assert frontend.http.get("/version", headers={"host": "page.example"}).status_code == 403
    with FrontendProcess(api_keys=("first",)) as frontend:
        headers = {"host": "llm.example", **bearer("first")}
        assert frontend.http.get("/v1/models", headers=headers).status_code == 200
        # The only key is also that of the operator.
        assert frontend.http.post("/reset_prefix_cache", headers=headers).status_code == 200


def test_only_the_admin_key_may_use_operator_routes(tenants: FrontendProcess) -> None:
    for path in OPERATORS:
        assert tenants.http.post(path).status_code == 401
        assert tenants.http.post(path, headers=bearer("wrong")).status_code == 401
        refused = tenants.http.post(path, headers=bearer("second"))
        assert refused.status_code == 403 and "--admin-api-key" in refused.text
        assert refused.json()["error"]["type"] == "permission_error"
    operated = tenants.http.post("/reset_prefix_cache", headers=bearer("operator"))
    assert operated.status_code == 200
    for path in ("/engine/status", "/v1/models"):
        for key in ("first", "operator"):
            assert tenants.http.get(path, headers=bearer(key)).status_code == 200


def test_tenants_may_not_use_operator_routes_without_an_admin_key() -> None:
    with FrontendProcess(api_keys=("first", "second")) as frontend:
        refused = frontend.http.post("/reset_prefix_cache", headers=bearer("first"))
        assert refused.status_code == 403 and "needs --admin-api-key" in refused.text


def test_an_admin_key_alone_protects_only_operator_routes() -> None:
    with FrontendProcess(admin_api_key="operator") as frontend:
        assert frontend.complete(PROMPT, max_tokens=1)["choices"]
        assert frontend.http.post("/reset_prefix_cache").status_code == 401
        operated = frontend.http.post("/reset_prefix_cache", headers=bearer("operator"))
        assert operated.status_code == 200


def roots(frontend: FrontendProcess, *asked: tuple[str, str | None]) -> list[bytes]:
    """Return the root hash of the prompt for each pair of API key and salt."""
    frontend.core.received.clear()
    for key, salt in asked:
        body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
        response = frontend.http.post(COMPLETIONS, json=body, headers=bearer(key))
        assert response.status_code == 200, response.text
    added = [m for m in frontend.core.received if isinstance(m, AddRequests)]
    return [request.root_hash for message in added for request in message.requests]


def test_each_key_has_its_own_prefix_cache(tenants: FrontendProcess) -> None:
    first, again, second, admin = roots(
        tenants, ("first", None), ("first", None), ("second", None), ("operator", None)
    )
    assert first == again and len({first, second, admin}) == 3
    mine, again, theirs = roots(tenants, ("first", "s"), ("first", "s"), ("second", "s"))
    assert mine == again and len({first, mine, theirs}) == 3


def test_api_keys_share_the_prefix_cache_if_allowed_or_single() -> None:
    with FrontendProcess(api_keys=("first", "second"), share_prefix_cache=True) as frontend:
        shared = roots(frontend, ("first", None), ("second", None), ("first", "s"), ("second", "s"))
        assert shared[0] == shared[1] != shared[2] == shared[3]
    with FrontendProcess(api_keys=("first",)) as frontend:
        assert roots(frontend, ("first", None)) == shared[:1]


def test_web_pages_may_use_only_the_given_methods_and_headers() -> None:
    with FrontendProcess(
        allowed_origins=("http://page.example", "localhost"),
        allowed_methods=("GET",),
        allowed_headers=("x-mine",),
        allow_credentials=True,
        disable_docs=True,
        middleware=("starlette.middleware.gzip.GZipMiddleware",),
    ) as frontend:
        asked = {**PAGE, "origin": "http://page.example"}
        for method, header, code in (
            ("GET", "x-mine", 200),
            ("POST", "x-mine", 400),
            ("GET", "x-other", 400),
        ):
            names = "access-control-request-method", "access-control-request-headers"
            preflight = dict(zip(names, (method, header), strict=True))
            response = frontend.http.options(COMPLETIONS, headers=asked | preflight)
            assert response.status_code == code, response.text
            assert response.headers["access-control-allow-credentials"] == "true"
        for origin, code in (("https://[::1]:3000", 200), ("http://localhost.example", 400)):
            local = asked | {"origin": origin, "access-control-request-method": "GET"}
            assert frontend.http.options(COMPLETIONS, headers=local).status_code == code
        assert {frontend.http.get(path).status_code for path in ("/docs", "/openapi.json")} == {404}
        assert frontend.http.get("/metrics").headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("no_such_module.Name", "cannot be imported"), ("os.environ", "must be an ASGI class")],
)
def test_invalid_middleware_is_named(name: str, problem: str) -> None:
    with FrontendProcess(with_core=False, middleware=(name,)) as frontend:
        frontend.wait_for_stage(Stage.FAILED)
        assert f"--middleware {name} {problem}" in frontend.stages[-1][1]
