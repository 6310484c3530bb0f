"""Pictures of the page for docs/: `python web/screenshots.py URL OUT VIEW [VIEW...]`, of a server at URL, with traffic.

The view `caches` is the playground with a comparison. Writes OUT/page_VIEW.png in light, OUT/page_VIEW_dark.png, and
OUT/page_VIEW_phone.png for a narrow screen. It needs playwright and Debian's Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SHOTS: dict[str, dict[str, Any]] = {
    "": {"viewport": {"width": 1200, "height": 760}},
    "_dark": {"viewport": {"width": 1200, "height": 760}, "color_scheme": "dark"},
    "_phone": {"viewport": {"width": 390, "height": 760}, "is_mobile": True, "has_touch": True},
}
WAIT_MS = 2_500


def main(url: str, out: str, *views: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for view in views:
            for name, options in SHOTS.items():
                page = browser.new_page(**options)
                page.goto(f"{url}/#{'make' if view == 'caches' else view}")
                if view == "make":
                    page.get_by_label("Seed").fill("7")
                    page.get_by_label("Deadline, s").fill("60")
                    page.get_by_role("button", name="Make it").click()
                    page.get_by_role("link", name="Save").wait_for(timeout=120_000)
                if view == "plan":
                    page.get_by_role("button", name="How many devices?").click()
                    page.get_by_role("table").first.wait_for(timeout=120_000)
                if view == "caches":
                    page.get_by_label("Seed").fill("7")
                    page.get_by_label("Cache").select_option("patch")
                    page.get_by_role("button", name="Compare caches").click()
                    page.get_by_text("Seed 7 for all").wait_for(timeout=120_000)
                    page.locator("[aria-busy=false] .saving polyline").wait_for(timeout=120_000)
                    page.get_by_role("region", name="Comparison").scroll_into_view_if_needed()
                page.wait_for_timeout(WAIT_MS)
                page.screenshot(path=Path(out) / f"page_{view}{name}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
