"""Pages of servers in a browser, and servers in processes of their own for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

from waiting import PATIENCE_S

MODELLED = ("--backend", "modelled", "--devices", "2", "--cost", "flux1dev_h100_eager", "--default-slo", "3x")


@contextmanager
def opened(browser: Browser, url: str, *, allows: int = 0, **options: Any) -> Iterator[Page]:
    """A page that has no error of its own, and asks no other machine.

    `allows` are the messages in its console that it may have: Chromium writes one for each answer that is an error.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[str] = []
    strays: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    own = (f"http://{urlsplit(url).netloc}/", "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(own) else strays.append(asked.url))
    page.set_default_timeout(1000 * PATIENCE_S)
    page.goto(url)
    yield page
    context.close()
    assert errors[allows:] == []
    assert strays == []


@contextmanager
def live_server(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tilework", "serve", *options, "--port", "0", "--json"]
    environ = os.environ | {"TILEWORK_DRAIN_S": "0.2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
