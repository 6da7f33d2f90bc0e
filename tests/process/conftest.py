"""What tests of pages need: a real browser."""

import shutil
from collections.abc import Iterator
from typing import Final

import pytest
from playwright.sync_api import Browser, sync_playwright

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A Chromium without a window, and without the network."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(
            f"there is no browser: none of {', '.join(BROWSERS)} is on PATH (Debian: apt install chromium)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
