"""The page at `/` in a real browser, headless Chromium: what a person sees, clicks and types.

Chromium is Debian's, which the tests install where they may. Most tests play an engine; the last has a live server.
`test_page_plan.py` is of the tab Plan.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

from builders import PIPELINE, request, table
from fake_engine import EDITOR, INFO, VIDEOS, FakeEngine, Plan, Served, serving
from live.pages import MODELLED, live_server, opened
from server.picture_files import plain
from stages import DIFFUSE, stage_of
from tilework.core.cache import CacheChoice, CacheKind
from tilework.core.model import NotServed
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.wire.reports import Ending
from tilework.core.wire.spec import VideoFormat
from tilework.core.work import Group, Member, Work
from tilework.cost.table_file import table_json
from tilework.pipelines.video.export import video_file
from tilework.report.cache_quality import psnr_db
from tilework.runtime.observer import EndedWork
from waiting import eventually

pytestmark = pytest.mark.slow
HELD = Plan(is_held=True)
PATCH = CacheKind.PATCH.setting
VIEWS = {"make": "Playground", "live": "Live", "ontime": "On time", "devices": "Devices", "plan": "Plan"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), drain_s=0) as served:
        yield served


@pytest.fixture
def engine(server: Served) -> FakeEngine:
    server.engine.script = [HELD]
    return server.engine


def make(page: Page, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=False).first.fill(value)
    page.get_by_role("button", name="Make it").click()


def sent(engine: FakeEngine, num_before: int) -> str:
    """The uid of the request that the page has sent."""
    eventually(lambda: len(engine.requests) > num_before and engine.requests[-1].uid in engine.spec_of)
    return engine.requests[-1].uid


def is_drawn(picture: Locator) -> bool:
    return bool(picture.evaluate("one => one.complete && one.naturalWidth > 0"))


# The playground.


def test_a_picture_is_watched_while_it_is_made_and_its_decisions_are_read(
    browser: Browser, server: Served, engine: FakeEngine
) -> None:
    before = len(engine.requests)
    with opened(browser, server.url) as page:
        make(page, Prompt="a red circle", Width="64", Height="32", Steps="8", Seed="200", Deadline="9")
        uid = sent(engine, before)
        asked = engine.requests[-1]
        assert (str(asked.shape), asked.steps, asked.seed) == ("64x32", 8, 200)
        assert asked.deadline_ns == pytest.approx(asked.arrival_ns + 9 * NS_PER_S, abs=NS_PER_S)
        assert engine.spec_of[uid].prompt == "a red circle"
        server.on_loop(engine.begin, uid)
        server.on_loop(engine.step, uid, asked.preview_every * 2)
        preview = page.get_by_alt_text("Unfinished preview")
        expect(preview).to_be_visible()
        eventually(lambda: is_drawn(preview))
        expect(page.get_by_role("status").filter(has_text=f"step {asked.preview_every * 2} of 8")).to_be_visible()
        server.on_loop(engine.finish, uid)
        result = page.get_by_role("region", name="Result")
        expect(result).to_contain_text("On time")
        expect(result).to_contain_text("accepted; expected to be done")
        picture = page.get_by_alt_text("a red circle").first
        eventually(lambda: is_drawn(picture))
        assert picture.evaluate("one => [one.naturalWidth, one.naturalHeight]") == [64, 32]
        with page.expect_download() as download:
            page.get_by_role("link", name="Save").click()
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
        assert page.get_by_label("Width").input_value() == "64", "what was typed stays"


def test_cancel_ends_the_request(browser: Browser, server: Served, engine: FakeEngine) -> None:
    before = len(engine.requests)
    with opened(browser, server.url) as page:
        make(page, Prompt="x")
        uid = sent(engine, before)
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("Cancelled.")).to_be_visible()
        eventually(lambda: uid in engine.cancelled)


def test_a_refusal_is_shown_in_the_servers_words(browser: Browser, server: Served, engine: FakeEngine) -> None:
    engine.script = [Plan(refuse_s=3.0)]
    with opened(browser, server.url, allows=1) as page:
        page.get_by_label("If it cannot be met").select_option("reject")
        make(page, Prompt="x", Deadline="1")
        expect(page.get_by_role("alert")).to_contain_text("slo_s = 3")


def test_keys_alone_make_a_picture_and_change_the_view(browser: Browser, server: Served, engine: FakeEngine) -> None:
    before = len(engine.requests)
    engine.script = [Plan()]
    with opened(browser, server.url) as page:
        prompt = page.get_by_label("Prompt")
        expect(prompt).to_be_visible()
        example = prompt.input_value()
        page.keyboard.press("3")
        expect(page.get_by_role("region", name="By class")).to_be_visible()
        page.keyboard.press("1")
        page.keyboard.press("/")
        expect(prompt).to_be_focused()
        assert prompt.input_value() == example, "no key has typed into it"
        page.keyboard.press("Control+A")
        page.keyboard.type("typed 2")
        page.keyboard.press("Control+Enter")
        uid = sent(engine, before)
        assert engine.spec_of[uid].prompt == "typed 2", "a digit in a field is no key of the page"
        expect(page.get_by_role("link", name="Save")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("3")
        expect(page.get_by_role("region", name="By class")).to_be_visible()
        page.keyboard.press("1")
        expect(page.get_by_role("region", name="Result")).to_be_visible()


def test_a_model_that_takes_pictures_gets_them(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "given.png"
    file.write_bytes(plain(32, 16))
    with serving(FakeEngine(info=EDITOR), drain_s=0) as served, opened(browser, served.url) as page:
        page.get_by_label("image (optional)", exact=True).set_input_files(file)
        expect(page.get_by_alt_text("given as image")).to_be_visible()
        make(page, Prompt="x")
        uid = sent(served.engine, 0)
        (given,) = served.engine.spec_of[uid].pictures["image"]
        assert (given.width, given.height) == (32, 16)
        expect(page.get_by_role("link", name="Save")).to_be_visible()


def test_the_prompt_is_one_that_the_model_draws_until_another_is_typed(browser: Browser) -> None:
    engine = FakeEngine(
        info=replace(INFO, words=(("colour", ("red", "blue")), ("shape", ("circle",)))), others=(VIDEOS,)
    )
    with serving(engine, drain_s=0) as served, opened(browser, served.url) as page:
        prompt, drawn = page.get_by_label("Prompt"), page.get_by_label("What it draws")
        expect(prompt).to_have_value("a large red circle on a blue background")
        expect(drawn).to_have_text("Draws colour: red, blue; shape: circle.")
        page.get_by_label("Model").select_option(VIDEOS.name)
        expect(prompt).to_have_value("a red circle moves left on a black background")
        expect(drawn).to_have_count(0)
        prompt.fill("a lighthouse")
        page.get_by_label("Model").select_option(INFO.name)
        expect(prompt).to_have_value("a lighthouse")
        page.get_by_role("button", name="Make it").click()
        expect(page.get_by_role("region", name="Result")).to_contain_text("draws no word of this prompt")


def test_a_model_that_is_not_served_is_there_with_its_reason(browser: Browser) -> None:
    reason = "it cannot be loaded (house/transformer/diffusion_pytorch_model.safetensors: cannot be read)"
    engine = FakeEngine(not_served={"house": NotServed(name="house", reason=reason, is_first=False)})
    with (
        serving(engine, drain_s=0) as served,
        opened(browser, served.url, viewport={"width": 360, "height": 800}) as page,
    ):
        expect(page.get_by_label("Not served")).to_have_text(f"house is not served: {reason}")
        expect(page.get_by_label("Model").locator("option")).to_have_text([INFO.name])
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_clips_play(browser: Browser) -> None:
    film = video_file(torch.zeros(9, 32, 32, 3, dtype=torch.uint8), VideoFormat(8)).content
    engine = FakeEngine(info=VIDEOS, plan=Plan(video=film))
    with serving(engine, drain_s=0) as served, opened(browser, served.url) as page:
        make(page, Prompt="x")
        video = page.locator("video")
        expect(video).to_be_visible()
        eventually(lambda: video.evaluate("one => one.readyState >= 2 && one.currentTime > 0"))
        assert video.evaluate("one => one.videoWidth") == 32


# Caches.

CACHES = replace(INFO, caches=tuple(CacheKind))


def test_a_cache_is_chosen_and_the_result_says_what_it_did(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as page:
        expect(page.get_by_role("button", name="Make it")).to_be_visible()
        expect(page.get_by_label("Cache")).to_have_count(0)
    with serving(FakeEngine(info=CACHES), drain_s=0, cache="patch") as served, opened(browser, served.url) as page:
        expect(page.get_by_label("Cache")).to_be_visible()
        offered = page.get_by_label("Cache").locator("option").evaluate_all("all => all.map(one => one.value)")
        assert offered == ["off", *CacheKind, "if_late"]
        expect(page.get_by_label("Interval")).to_have_count(0)
        expect(page.get_by_role("button", name="Compare caches")).to_have_count(0)
        make(page, Prompt="x")
        sent(served.engine, 0)
        assert served.engine.specs[-1].cache is None, "off is off, whatever the server prefers"
        page.get_by_label("Cache").select_option("taylorseer")
        expect(page.get_by_label("Interval")).to_have_value("5")
        make(page, Prompt="x", Interval="3")
        sent(served.engine, 1)
        assert served.engine.specs[-1].cache == CacheChoice(CacheKind.TAYLORSEER, 3)
        expect(page.get_by_role("region", name="Result")).to_contain_text("of the blocks skipped")


def compared(page: Page, kind: str) -> Locator:
    """The comparison of a cache, begun with the keyboard."""
    page.get_by_label("Cache").select_option(kind)
    page.get_by_role("button", name="Compare caches").focus()
    page.keyboard.press("Enter")
    return page.get_by_role("region", name="Comparison")


def test_a_comparison_is_cancelled_or_refused(browser: Browser) -> None:
    engine = FakeEngine(info=CACHES, script=[Plan(), HELD, Plan(), Plan(refuse_s=3.0)])
    with serving(engine, drain_s=0) as served, opened(browser, served.url, allows=1) as page:
        comparison = compared(page, "patch")
        expect(comparison.get_by_text("picture 2 of 5")).to_be_visible()
        uid = sent(engine, 1)
        comparison.get_by_role("button", name="Cancel").click()
        expect(comparison.get_by_text("Cancelled.")).to_be_visible()
        eventually(lambda: uid in engine.cancelled)
        assert len({one.seed for one in engine.requests}) == 1
        page.get_by_label("Deadline, s").fill("1")
        page.get_by_label("If it cannot be met").select_option("reject")
        comparison = compared(page, "patch")
        expect(comparison.get_by_role("alert")).to_contain_text("slo_s = 3")
        expect(comparison.locator("figure")).to_have_count(1)
        expect(comparison).to_have_attribute("aria-busy", "false")
        assert len(engine.specs) == 3, "nothing is asked for after a refusal"


def pixels_of(picture: Locator) -> np.ndarray:
    _, data = (picture.get_attribute("src") or "").split(",")
    return np.asarray(PIL.Image.open(BytesIO(base64.b64decode(data))).convert("RGB"))


def test_a_comparison_shows_savings_beside_their_quality(browser: Browser, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(table_json(table(0.02, 0.02, 0.02, pipeline="shapes"))))
    size: Any = {"width": 390, "height": 844}
    options = ["shapes", "--device", "cpu", "--devices", "1", "--cost", str(costs)]
    with live_server(*options) as url, opened(browser, url, viewport=size) as page:
        page.get_by_label("Steps").fill("8")
        comparison = compared(page, "patch")
        expect(comparison.locator("circle")).to_have_count(4)
        shown = comparison.locator("figure").all()
        plain, *others = (pixels_of(one.get_by_role("img")) for one in shown)
        assert all(is_drawn(one.get_by_role("img")) for one in shown)
        assert "no cache" in shown[0].inner_text()
        savings = []
        for figure, pixels, title, value in zip(
            shown[1:], others, comparison.locator("title").all_text_contents(), PATCH.usual, strict=True
        ):
            ratio_db, told = psnr_db(pixels, plain), figure.inner_text()
            quality = "equal" if ratio_db == math.inf else f"{ratio_db:.1f} dB"
            assert f"patch, {value}" in told
            assert quality in told
            (saving,) = re.findall(r"(\d+)% skipped", told)
            assert title == f"{value}: {saving}% skipped, {quality}"
            savings.append(int(saving))
        assert savings == sorted(savings)
        assert savings[-1] > 20
        assert len(comparison.locator("polyline").get_attribute("points").split()) == 4
        wide = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]


# Devices over time, and the queue.


class Played:
    """An engine whose works the test plays: each is sent, and ends when the test says so."""

    def __init__(self, served: Served) -> None:
        self.served, self.engine = served, served.engine
        self.num_works = 0

    def now_s(self) -> float:
        return self.engine.now_ns() / NS_PER_S

    def work(self, devices: Group, one: Request, steps: int = 2) -> Work:
        self.num_works += 1
        return Work(
            work_id=self.num_works,
            stage=stage_of(PIPELINE, DIFFUSE),
            members=(Member(1, 1, 1, 0),),
            devices=devices,
            num_steps=steps,
            why="",
        )

    def ran(self, devices: Group, one: Request, start_s: float, end_s: float) -> None:
        work = self.work(devices, one)
        span = {"start_ns": ns_from_s(start_s), "end_ns": ns_from_s(end_s), "predicted_ns": 0, "correction": 1.0}
        ended = EndedWork(work=work, requests=(one,), ending=Ending.DONE, steps_done=2, **span)  # type: ignore[arg-type]
        self.served.on_loop(self.engine.observer.on_work_sent, work, (one,), 0, span["start_ns"])
        self.served.on_loop(self.engine.observer.on_work_ended, ended)


def pixels(page: Page) -> bytes:
    return page.locator(".plot").screenshot()


def still_pixels(page: Page, for_ms: int = 0) -> bytes:
    """As soon as the plot is the same twice, so long after each other."""
    seen = [b""]

    def stands_still() -> bool:
        page.wait_for_timeout(for_ms)
        seen.append(pixels(page))
        return seen[-1] == seen[-2]

    eventually(stands_still)
    return seen[-1]


def hovered(page: Page) -> tuple[float, float]:
    """Move the pointer along the first lane, from now to the past, until it is on a tile; returns where."""

    def found() -> tuple[float, float] | None:
        box = page.locator(".plot").bounding_box()
        assert box is not None
        for x in range(int(box["width"]) - 4, 100, -12):
            page.mouse.move(box["x"] + x, box["y"] + 30)
            if page.locator(".tip").count():
                return box["x"] + x, box["y"] + 30
        return None  # There is no frame with it yet.

    place = eventually(found)
    assert place is not None
    return place


def test_the_timeline_is_hovered_paused_moved_and_chosen_from(browser: Browser) -> None:
    with serving(FakeEngine(plan=HELD), drain_s=0) as served, opened(browser, served.url) as page:
        played = Played(served)
        uid = served.post({"prompt": "x", "slo_s": 60}, headers={"Prefer": "respond-async"}).json()["uid"]
        one = served.engine.tickets[f"{uid}-0"].request
        served.on_loop(served.engine.begin, one.uid)
        begin_s = played.now_s() - 8
        played.ran((0,), one, begin_s, begin_s + 4)
        played.ran((0, 1), one, begin_s + 4, begin_s + 8)
        played.ran((1,), request("another", tenant="another"), begin_s, begin_s + 4)
        page.get_by_role("link", name="Live").click()
        plot = page.locator(".plot")
        expect(page.get_by_role("region", name="Queue")).to_contain_text("1 open")
        page.get_by_role("button", name="Pause").click()
        plot.focus()
        for _ in range(2):
            page.keyboard.press("ArrowLeft")  # So that the line of the present time is out of view.
        page.mouse.move(5, 5)
        still = still_pixels(page, for_ms=700)  # In which a view that follows would move.

        found = hovered(page)
        expect(page.locator(".tip")).to_contain_text("steps 1-2 of 4 on devices 0-1")
        page.mouse.click(*found)
        card = page.get_by_role("complementary", name="Request 1")
        expect(card).to_contain_text(one.uid)
        expect(card).to_contain_text("accepted; expected to be done")
        page.mouse.move(5, 5)
        eventually(lambda: pixels(page) != still)  # The others are pale.

        plot.focus()
        page.keyboard.press("Escape")
        expect(card).to_have_count(0)
        before = still_pixels(page)
        page.keyboard.press("ArrowLeft")
        eventually(lambda: pixels(page) != before)
        moved = still_pixels(page)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("+")
        eventually(lambda: pixels(page) not in (before, moved))
        page.keyboard.press("]")
        expect(card).to_be_visible()
        page.keyboard.press("End")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        first = pixels(page)
        eventually(lambda: pixels(page) != first)  # A view that follows moves on.


def test_sizes_keep_their_colours_when_the_page_is_loaded_again(browser: Browser) -> None:
    headers = {"Prefer": "respond-async"}
    with serving(FakeEngine(plan=HELD), drain_s=0) as served, opened(browser, served.url) as page:
        first = served.post({"prompt": "x", "size": "64x64"}, headers=headers).json()["uid"]
        page.get_by_role("link", name="Live").click()
        legend = page.locator(".legend > span")
        expect(legend).to_have_text(["64x64"])
        served.post({"prompt": "x", "size": "96x96"}, headers=headers)
        expect(legend).to_have_text(["64x64", "96x96"])
        colours = _colours(legend)
        served.on_loop(served.engine.cancel, f"{first}-0", "not wanted")  # It comes behind the open one now.
        page.reload()
        expect(legend).to_have_text(["96x96", "64x64"])
        assert _colours(legend) == colours
        assert len(set(colours.values())) == 2


def _colours(legend: Locator) -> dict[str, str]:
    """The colour of each size."""
    swatch = "one => getComputedStyle(one.querySelector('.swatch')).backgroundColor"
    return {one.inner_text(): one.evaluate(swatch) for one in legend.all()}


def test_a_tile_of_another_tenant_has_no_name(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.anna]\nkeys = ["anna"]\n\n[tenants.ben]\nkeys = ["ben"]\n')
    with serving(FakeEngine(plan=HELD), drain_s=0, tenants=str(file)) as served:
        headers = {"Prefer": "respond-async", "Authorization": "Bearer ben"}
        uid = served.post({"prompt": "x"}, headers=headers).json()["uid"]
        one = served.engine.tickets[f"{uid}-0"].request
        with opened(browser, served.url, allows=10) as page:
            page.get_by_label("API key of this server").fill("wrong")
            page.get_by_role("button", name="Use it").click()
            expect(page.get_by_text("The server does not know this key.")).to_be_visible()
            page.get_by_label("API key of this server").fill("anna")
            page.get_by_role("button", name="Use it").click()
            expect(page.get_by_role("dialog")).to_have_count(0)
            expect(page.get_by_role("button", name="Make it")).to_be_visible()
            page.get_by_role("link", name="Live").click()
            played = Played(served)
            played.ran((0, 1), one, played.now_s() - 6, played.now_s())
            expect(page.get_by_text("other tenants", exact=True)).to_be_visible()
            page.get_by_role("button", name="Pause").click()
            hovered(page)
            expect(page.locator(".tip")).to_contain_text("of another tenant")
            assert one.uid not in page.content()
            page.reload()
            expect(page.get_by_role("region", name="Queue")).to_be_visible(), "the key is for the tab"
        with opened(browser, f"{served.url}/docs", http_credentials={"username": "me", "password": "anna"}) as page:
            expect(page.get_by_text("/v1/images/generations", exact=True).first).to_be_visible()


def test_the_scope_admin_reads_decisions_about_requests_of_all(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.ben]\nkeys = ["ben"]\n')
    with serving(FakeEngine(plan=HELD), drain_s=0, tenants=str(file), admin_key="root") as served:
        served.post({"prompt": "x"}, headers={"Prefer": "respond-async", "Authorization": "Bearer ben"})
        with opened(browser, f"{served.url}/#live", allows=10) as page:
            page.get_by_label("API key of this server").fill("root")
            page.get_by_role("button", name="Use it").click()
            page.get_by_role("region", name="Queue").get_by_role("button").first.click()
            card = page.get_by_role("complementary", name="Request 1")
            expect(card).to_contain_text("accepted; expected to be done")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_any_screen_and_reads_well(browser: Browser, server: Served, scheme: Any, width: int) -> None:
    size: Any = {"width": width, "height": 844}
    with opened(browser, server.url, viewport=size, color_scheme=scheme) as page:
        for name, title in VIEWS.items():
            link = page.get_by_role("link", name=title, exact=True)
            link.click()
            expect(link).to_have_attribute("aria-current", "page")
            wide = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], f"{name} is wider than the screen"
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(22, 24, 27)") is (scheme == "dark")


def test_it_says_when_the_server_has_gone_and_comes_back(browser: Browser) -> None:
    with serving(FakeEngine(), drain_s=0) as served, opened(browser, served.url, allows=99) as page:
        expect(page.get_by_text("0 open")).to_be_visible()
        served.stop()
        expect(page.get_by_role("status").filter(has_text="The server")).to_be_visible()


# A live server.


def test_a_live_server_with_front_ends_shows_what_it_did(browser: Browser) -> None:
    with (
        live_server(*MODELLED, "--frontends", "2") as url,
        httpx.Client(base_url=url, timeout=60) as http,
        opened(browser, url) as page,
    ):
        expect(page.get_by_text("0 of 2 devices busy")).to_be_visible()
        page.get_by_role("link", name="Live").click()
        uids = [
            http.post("/v1/images/generations", json={"prompt": "x", "size": size}, headers={"Prefer": "respond-async"})
            .raise_for_status()
            .json()["uid"]
            for size in ("256x256", "512x512", "256x256")
        ]
        queue = page.get_by_role("region", name="Queue")
        expect(queue.get_by_role("button", name="flux.1-dev 256x256")).to_have_count(2)
        expect(queue.locator("tbody.ended tr")).to_have_count(3)
        state = http.get("/v1/live").json()
        numbers = {one["uid"]: one["number"] for one in state["ended"]}
        for uid in uids:
            timeline = http.get(f"/v1/requests/{uid}").json()["images"][0]["timeline"]
            tiles = [tile for tile in state["tiles"] if numbers[f"{uid}-0"] in tile["requests"]]
            told = [(one["stage"], one["devices"], one["steps"]) for one in timeline["segments"]]
            assert [(tile["stage"], tile["devices"], tile["steps"]) for tile in tiles] == told
            durations = [one["end_s"] - one["start_s"] for one in timeline["segments"]]
            assert [tile["end_s"] - tile["start_s"] for tile in tiles] == pytest.approx(durations, abs=1e-3)
        queue.locator("tbody.ended button").first.click()
        expect(page.get_by_role("complementary")).to_contain_text("done ")
        page.get_by_role("link", name="On time").click()
        expect(page.get_by_role("region", name="By model")).to_contain_text("of 3")
