"""Drives the web page of a server in the Chromium of this machine."""

from __future__ import annotations

import shutil
from typing import Any, Self

from playwright.sync_api import Browser, Page, Playwright, expect

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 60_000
"""Generous, because the machine may be slow and busy."""

expect.set_options(timeout=TIMEOUT_MS)


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def launch_chromium(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)


class WebPage:
    """The page of a server in a new, empty profile.

    `errors` has the errors that it logged, and `hosts` the hosts that it contacted.
    """

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self._context = browser.new_context(**context)
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._record_message)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request", lambda request: self.hosts.add("/".join(request.url.split("/")[:3]))
        )
        self.page.goto(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def _record_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def enter_key(self, key: str) -> None:
        dialog = self.page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill(key)
        dialog.get_by_role("button", name="Use this key").click()

    def change_settings(self, **values: str) -> None:
        """Fill fields of the settings, named by their labels with `_` for a space."""
        self.page.get_by_role("button", name="Settings", exact=True).click()
        panel = self.page.get_by_role("complementary", name="Settings")
        for label, value in values.items():
            panel.get_by_label(label.replace("_", " ")).fill(value)
        panel.get_by_role("button", name="Close settings").click()

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_end(self) -> None:
        """Wait until an answer has been streamed and no stream is active."""
        expect(self.last_answer.locator(".cost")).to_be_visible()
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()

    @property
    def last_answer(self) -> Any:
        return self.page.get_by_role("article", name="Answer").last

    def open_engine(self) -> None:
        self.page.get_by_role("link", name="Engine").click()
