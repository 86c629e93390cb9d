"""Take the screenshots of the web page for the documentation: .venv/bin/python scripts/screenshots.py.

It needs Chromium (Debian: apt install chromium). The fonts Inter and P052 (fonts-inter, fonts-urw-base35) are
recommended.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import Page, expect, sync_playwright  # noqa: E402
from support.servers.server import Server, default_model  # noqa: E402
from support.servers.web_browser import WebPage, launch_chromium  # noqa: E402

QUESTIONS = ("What is gravity?", "Write a Python function that adds two numbers.")


def save(page: Page, name: str) -> None:
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.save(ROOT / "docs/images" / f"{name}.webp", quality=80, method=6)


def take_pictures(server: Server) -> None:
    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        size = {"width": 1180, "height": 800}
        with WebPage(browser, server.url, viewport=size, color_scheme="light") as web:
            web.change_settings(Temperature="0", Most_tokens="160")
            for question in QUESTIONS:
                web.ask(question)
                web.wait_for_end()
            save(web.page, "web-chat")
            web.open_engine()
            web.page.wait_for_timeout(4000)
            # Requests that run while the charts grow. A browser opens only six connections to a server, and the page
            # needs some of them.
            web.page.evaluate(
                """() => Promise.all([0, 1, 2, 3].map(async (n) => {
                    await new Promise((done) => setTimeout(done, 2000 * n));
                    await fetch("v1/chat/completions", {
                        method: "POST",
                        headers: {"Content-Type": "application/json"},
                        body: JSON.stringify({
                            max_tokens: 60 + 40 * n,
                            messages: [{role: "user", content: "Tell a long story about " + n + " ships."}],
                        }),
                    });
                }))"""
            )
            expect(web.page.get_by_role("button", name="Why:").nth(5)).to_be_visible()
            save(web.page, "web-engine")
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as dumps:
        flags = ("--max-model-len", "2048", "--dump-dir", dumps)
        name = "SmolLM2-135M-Instruct"
        with Server(default_model(), "--served-model-name", name, *flags) as server:
            take_pictures(server)


if __name__ == "__main__":
    main()
