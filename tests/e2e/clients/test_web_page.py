"""The web page of a server of the default model, in a real browser."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.server import Server, default_model

pytest.importorskip("playwright", reason="the package playwright is not installed")

from playwright.sync_api import Browser, expect, sync_playwright
from support.servers.web_browser import WebPage, find_chromium, launch_chromium

# The first test waits for a server and, on a slow machine, for minutes of npm.
pytestmark = pytest.mark.timeout(900)

KEY = "a-key"
WEB = Path(__file__).parents[3] / "frontend" / "web"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `frontend/web` with the packages of its lock file."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which installs what builds and checks the page")
    copy = tmp_path_factory.mktemp("web") / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules", "bundle"))
    command = ["npm", "ci", "--ignore-scripts", "--no-progress"]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=240)
    if result.returncode:
        pytest.skip(f"npm cannot install the packages of the page: {result.stderr[-300:]}")
    return copy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if find_chromium() is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    dumps = str(tmp_path_factory.mktemp("dumps"))
    flags = ("--max-model-len", "2048", "--dump-dir", dumps, "--api-key", KEY)
    with Server(default_model(), "--served-model-name", "smollm2", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = launch_chromium(playwright)
        yield chromium
        chromium.close()


def assert_is_clean(web: WebPage, server: Server) -> None:
    """Check that only the refusals without a key were logged, and that no other host was contacted."""
    assert not [error for error in web.errors if "401" not in error]
    assert web.hosts - {"blob:", "data:"} == {server.url}


def test_a_conversation_streams_stops_branches_and_outlives_a_reload(
    browser: Browser, server: Server
) -> None:
    with WebPage(browser, server.url) as web:
        page = web.page
        web.enter_key("wrong")
        expect(page.get_by_role("dialog", name="API key")).to_be_visible()
        web.enter_key(KEY)
        expect(page.get_by_label("Model")).to_have_value("smollm2")

        web.change_settings(Temperature="0", System_prompt="You write long stories.")
        web.ask("Tell me a very long story about the sea.")
        expect(web.last_answer.locator(".markdown")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(web.last_answer).to_contain_text("stopped")
        web.wait_for_end()

        web.change_settings(Most_tokens="8")
        web.last_answer.get_by_role("button", name="Retry").click()
        expect(web.last_answer).to_contain_text(re.compile(r"2 / 2.*8 tokens.*a second.*% cached"))

        question = page.get_by_role("article", name="Question")
        question.hover()
        question.get_by_role("button", name="Edit").click()
        page.get_by_label("Edited question").fill("Say hello to <b>me</b>.")
        page.get_by_role("button", name="Ask again").click()
        expect(question).to_contain_text("2 / 2")
        web.wait_for_end()
        # Text that looks like HTML remains text.
        expect(question).to_contain_text("Say hello to <b>me</b>.")
        question.get_by_role("button", name="Earlier branch").click()
        expect(question).to_contain_text("about the sea")
        answer = web.last_answer.locator(".markdown").inner_text()

        page.reload()
        page.get_by_role("navigation").get_by_role(
            "button", name="Tell me a very long story about the sea.", exact=True
        ).click()
        expect(web.last_answer.locator(".markdown")).to_have_text(answer)
        expect(web.last_answer).to_contain_text("2 / 2")
        assert_is_clean(web, server)


def test_an_answer_follows_a_schema_and_a_wrong_one_is_reported(
    browser: Browser, server: Server
) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    with WebPage(browser, server.url) as web:
        web.enter_key(KEY)
        web.change_settings(Temperature="0", JSON_schema_of_the_answer=json.dumps(schema))
        web.ask("Name a number.")
        web.wait_for_end()
        assert json.loads(web.last_answer.locator(".markdown").inner_text()) == {"n": 7}
        web.change_settings(JSON_schema_of_the_answer="{")
        web.ask("And another.")
        expect(web.last_answer.get_by_role("alert")).to_contain_text("JSON schema must be JSON")
        assert_is_clean(web, server)


def test_engine_view_shows_numbers_and_explains_waiting(browser: Browser, server: Server) -> None:
    with WebPage(browser, server.url) as web:
        page = web.page
        web.enter_key(KEY)
        web.change_settings(Most_tokens="8")
        web.ask("Say hello.")
        web.wait_for_end()
        web.open_engine()
        figures = page.locator(".figures")
        expect(figures).to_contain_text(re.compile(r"Tokens a second\s*\d"))
        expect(figures).to_contain_text(re.compile(r"Prefix hits\s*\d"))
        kv_cache = page.get_by_role("region", name="KV cache")
        expect(kv_cache).to_contain_text(re.compile(r"of \d"))
        described = kv_cache.get_by_role(
            "img", name=re.compile(r"Map of \d+ blocks: .* [1-9]\d* cached")
        )
        expect(described).to_be_visible()
        processes = page.get_by_role("region", name="Processes")
        for process in ("frontend 0", "core 0", "worker 0"):
            expect(processes.get_by_role("row", name=process)).to_contain_text("ready")
        page.get_by_role("button", name="Why:").first.click()
        why = page.get_by_role("dialog", name="Why?")
        expect(why).to_contain_text("Waited")
        expect(why.locator("pre")).to_contain_text(re.compile(r"admitted with \d+ tokens? cached"))
        assert_is_clean(web, server)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_every_view_is_accessible(
    browser: Browser, server: Server, packages: Path, scheme: str, width: int
) -> None:
    axe = (packages / "node_modules/axe-core/axe.min.js").read_text()
    size = {"width": width, "height": 800}
    # The policy would also block the checker itself.
    options = {"viewport": size, "color_scheme": scheme, "bypass_csp": True}
    with WebPage(browser, server.url, **options) as web:
        page = web.page
        page.evaluate(axe)

        def check() -> None:
            found = page.evaluate("axe.run().then(result => result.violations)")
            assert not [(v["id"], [n["html"] for n in v["nodes"]]) for v in found]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        check()
        web.enter_key(KEY)
        web.change_settings(Most_tokens="8")
        web.ask("Say hello.")
        web.wait_for_end()
        check()
        page.get_by_role("button", name="Settings", exact=True).click()
        check()
        page.evaluate("location.hash = 'engine'")
        expect(page.get_by_role("button", name="Why:").first).to_be_visible()
        expect(page.get_by_role("region", name="Processes")).to_contain_text("core 0")
        check()


def test_rebuilding_the_web_page_gives_the_committed_bundle(packages: Path) -> None:
    for script in ("check", "build"):
        command = ["npm", "run", "--silent", script]
        result = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
    names = sorted(path.name for path in (WEB / "bundle").iterdir())
    assert names == sorted(path.name for path in (packages / "bundle").iterdir())
    same, different, missing = filecmp.cmpfiles(
        WEB / "bundle", packages / "bundle", names, shallow=False
    )
    assert same == names, f"run npm ci and npm run build in frontend/web: {different or missing}"


def test_the_lock_file_names_no_host_of_a_registry() -> None:
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]
