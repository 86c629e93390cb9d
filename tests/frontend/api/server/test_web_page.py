"""The web page of `GET /`, its files and their headers, and the routes that it uses."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import pytest
from engine.frontend.api.routes.web_page import BUNDLE, prefers_html
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = ("/web/app.js", "/web/app.css", "/web/icon.svg")


@pytest.fixture(scope="module")
def keyed() -> Iterator[FrontendProcess]:
    """A frontend with API keys, below a path that a proxy removes."""
    with FrontendProcess(
        step_s=0.0005, api_keys=("first", "second"), admin_api_key="operator", root_path="/llm"
    ) as process:
        yield process
        assert process.stop() == 0, process.log


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_browsers_get_the_page_and_others_the_text(keyed: FrontendProcess) -> None:
    page = keyed.http.get("/", headers=BROWSER)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<base href="/llm/">' in page.text and 'src="web/app.js"' in page.text
    assert "accept" in page.headers["vary"].lower()
    for accept in ("*/*", "application/json", "text/plain", ""):
        text = keyed.http.get("/", headers={"accept": accept})
        assert text.status_code == 200 and text.text.startswith("Engine is running"), accept
    assert keyed.http.head("/").status_code == 200
    assert keyed.http.head("/", headers=BROWSER).content == b""


def test_an_accept_header_prefers_html_only_if_it_names_it_first() -> None:
    assert prefers_html("text/html") and prefers_html(BROWSER["accept"])
    assert prefers_html("text/html;q=0.9, text/plain;q=0.5")
    assert not prefers_html("text/html;q=0.1, application/json")
    assert not prefers_html("text/html;q=0") and not prefers_html("text/html;q=much")


@pytest.mark.parametrize("path", ["/", *FILES])
def test_files_need_no_key_and_have_strict_headers(keyed: FrontendProcess, path: str) -> None:
    response = keyed.http.get(path, headers=BROWSER)
    assert response.status_code == 200
    policy = dict(
        rule.strip().partition(" ")[::2]
        for rule in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", *FILES])
def test_unchanged_files_are_not_sent_again(keyed: FrontendProcess, path: str) -> None:
    for encoding in ("identity", "gzip"):
        headers = {**BROWSER, "accept-encoding": encoding}
        response = keyed.http.get(path, headers=headers)
        assert response.headers.get("content-encoding", "identity") == encoding
        etag = response.headers["etag"]
        again = keyed.http.get(path, headers={**headers, "if-none-match": f'"other", W/{etag}'})
        assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == etag
        other = {**headers, "if-none-match": '"other"'}
        assert keyed.http.get(path, headers=other).text == response.text


def test_the_bundle_is_small_and_names_no_other_host() -> None:
    files = sorted(BUNDLE.iterdir())
    assert {file.name for file in files} == {"index.html", "app.js", "app.css", "icon.svg"}
    assert sum(len(gzip.compress(file.read_bytes(), mtime=0)) for file in files) < 150_000
    page = (BUNDLE / "index.html").read_text()
    assert not re.search(r"<script>|<style| style=| on\w+=|https?:", page)
    assert not re.search(r"@import|url\(", (BUNDLE / "app.css").read_text())


def test_operators_see_the_latest_requests_without_their_content(keyed: FrontendProcess) -> None:
    body = {"prompt": "one two three four", "max_tokens": 3}
    headers = {**bearer("first"), "x-request-id": "asked-by-first"}
    assert keyed.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    for path in ("/debug/requests", "/debug/kv-cache"):
        assert keyed.http.get(path, headers=bearer("first")).status_code == 403
    listed = keyed.http.get("/debug/requests", headers=bearer("operator"))
    assert listed.status_code == 200 and "one two" not in listed.text
    answer = listed.json()
    assert answer["can_explain"] is False and answer["num_frontends"] == 1
    last = answer["requests"][-1]
    assert last["id"].startswith("asked-by-first") or "asked-by-first" in last["id"]
    assert last["generated_tokens"] == 3 and last["finish_reason"] == "length"
    assert 0 <= last["first_token_ms"] <= last["finished_ms"] <= last["age_ms"]


def test_only_the_servers_own_page_may_use_operator_routes(keyed: FrontendProcess) -> None:
    own = {"host": "llm.example", "origin": "https://llm.example"}
    allowed = keyed.http.post("/reset_prefix_cache", headers={**bearer("operator"), **own})
    assert allowed.status_code == 200
    assert keyed.http.post("/reset_prefix_cache", headers=own).status_code == 401
    foreign = {**own, "origin": "https://page.example"}
    refused = keyed.http.post("/reset_prefix_cache", headers={**bearer("operator"), **foreign})
    assert refused.status_code == 403 and "https://page.example" in refused.text
    # A proxy may change the host.
    proxied = {"origin": "https://llm.example", "sec-fetch-site": "same-origin"}
    assert (
        keyed.http.post("/reset_prefix_cache", headers={**bearer("operator"), **proxied})
    ).status_code == 200


def test_rebound_host_name_is_not_the_servers_own_page() -> None:
    with FrontendProcess(step_s=0.0005, allowed_hosts=("*",)) as open_to_all:
        rebound = {"host": "page.example", "origin": "http://page.example"}
        response = open_to_all.http.post("/reset_prefix_cache", headers=rebound)
        assert response.status_code == 403
        address = {"host": "10.0.0.7:80", "origin": "http://10.0.0.7:80"}
        assert open_to_all.http.post("/reset_prefix_cache", headers=address).status_code == 200
