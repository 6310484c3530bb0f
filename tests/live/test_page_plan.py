"""The tab Plan of the page at `/`, in headless Chromium."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, expect

from fake_engine import FakeEngine, Plan, serving
from live.pages import MODELLED, live_server, opened
from server.plans import DOCUMENT, POINT, running, says

pytestmark = pytest.mark.slow


def plan_document() -> dict[str, Any]:
    """Of many numbers close together, near a high target; one was ended early."""
    shares = [0.7, *(0.95 + 0.001 * place for place in range(48)), 1.0, 1.0]
    points = [
        POINT | {"devices": 40 + place, "share": share, "low": share - 0.02, "is_whole": place > 0, "high": 1.0}
        for place, share in enumerate(shares)
    ]
    (own,) = DOCUMENT["hardware"]  # type: ignore[misc]
    return DOCUMENT | {"hardware": [own | {"devices": 57, "devices_in_the_mean": 55, "points": points}]}


def overlaps(texts: Locator) -> list[str]:
    """Texts that lie on another one."""
    boxes = [(one.text_content(), one.bounding_box()) for one in texts.all()]
    found = []
    for place, (text, box) in enumerate(boxes):
        for _, other in boxes[:place]:
            assert box is not None
            assert other is not None
            apart = box["x"] >= other["x"] + other["width"] or other["x"] >= box["x"] + box["width"]
            under = box["y"] >= other["y"] + other["height"] or other["y"] >= box["y"] + box["height"]
            if not (apart or under):
                found.append(text or "")
    return found


@pytest.mark.parametrize("width", [390, 1280])
def test_the_plan_is_asked_for_and_read(browser: Browser, width: int) -> None:
    size: Any = {"width": width, "height": 844}
    with serving(FakeEngine(plan=Plan()), drain_s=0) as served, opened(browser, served.url, viewport=size) as page:
        for _ in range(20):
            assert served.post({"prompt": "x", "slo_s": 9}).status_code == 200
        page.get_by_role("link", name="Plan", exact=True).click()
        plan = page.get_by_role("region", name="Plan")
        plan.get_by_label("On time, %").fill("99")
        with running(says(plan_document())):
            plan.get_by_role("button", name="How many devices?").click()
            answer = plan.get_by_role("status").filter(has_text="57 devices for 99% on time")
            expect(answer).to_contain_text("there are 2 now; 55 reach it in the mean only")
        expect(plan).to_contain_text("on 2 devices it keeps 50% on time, where 52% were: 1.5 points too few")
        expect(plan).to_contain_text("20 with a deadline; 2 simulations in 1.25 s")
        expect(plan.locator("tr.chosen")).to_contain_text("57")
        expect(plan.get_by_text("≤ 70%")).to_be_visible()
        expect(plan.get_by_text("A hollow point was ended early")).to_be_visible()
        expect(plan.get_by_role("table", name="What the devices do")).to_contain_text("1: 90%, 2: 10%")
        curve = plan.get_by_role("img")
        expect(curve.locator("circle.open")).to_have_count(1)
        expect(curve.locator("g.chosen text")).to_have_text("57")
        assert overlaps(curve.locator("text")) == []
        wide = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
        views = page.get_by_role("navigation").get_by_role("link").all()
        assert len({box["y"] for one in views if (box := one.bounding_box())}) == 1, "the views are in one row"


def test_what_the_plan_lacks_is_told(browser: Browser) -> None:
    with serving(FakeEngine(), drain_s=0) as served, opened(browser, f"{served.url}/#plan", allows=1) as page:
        page.get_by_role("button", name="How many devices?").click()
        expect(page.get_by_role("alert")).to_contain_text("0 requests with a deadline have come")


def test_a_live_server_plans_from_what_it_served(browser: Browser) -> None:
    with (
        live_server(*MODELLED) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        opened(browser, f"{url}/#plan") as page,
    ):
        expect(page.get_by_text("0 of 2 devices busy")).to_be_visible()
        body = {"prompt": "x", "size": "256x256", "n": 8, "slo_s": 60}
        for _ in range(3):
            http.post("/v1/images/generations", json=body).raise_for_status()
        page.get_by_label("On time, %").fill("80")
        page.get_by_role("button", name="How many devices?").click()
        plan = page.get_by_role("region", name="Plan")
        expect(plan).to_contain_text("for 80% on time; there are 2 now")
        expect(plan.locator("tr.chosen")).to_contain_text("meets")
        expect(plan.get_by_role("table", name="What the devices do")).to_contain_text("flux.1-dev diffuse")
        expect(plan).to_contain_text("on 2 devices it keeps 100% on time, as many as were.")
