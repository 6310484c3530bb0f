"""Fixtures of live tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import debian
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright  # Most of these tests need no browser.

    if not debian.has("chromium", "chromium"):
        pytest.skip("needs Chromium")
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()
