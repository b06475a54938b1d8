"""A Chromium to look at the page with: the system's (apt or the like has it), or the one that Playwright fetched."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Skips, and says why, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        path = next((found for name in _NAMES if (found := shutil.which(name))), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip("no Chromium on this machine: `apt-get install chromium` or `playwright install chromium` "
                        f"brings one ({str(error).splitlines()[0]})")
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page whose console and network are listened to."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.refusals_expected = False
        self._address = address
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        # A browser reports every 4xx as an error, also one that the page handles.
        if message.type in ("error", "warning") and not (self.refusals_expected and "status of 4" in message.text):
            self.complaints.append(f"{message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self._address, "data:")):
            self.complaints.append(f"asks elsewhere: {request.url}")

    def open(self, path: str = "/") -> Any:
        self.page.goto(self._address + path)
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
