"""Records the page of a running server as a looping animation: `python tools/live_animation.py docs/page_live.gif`.

It starts a server with eight simulated devices, sends it images of four sizes with deadlines, and takes screenshots of
the page in Chromium (`/usr/bin/chromium`), two or three a second. All of it ran; only the devices are simulated.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from random import Random

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

SERVE = ("serve", "--backend", "modelled", "--cost", "flux1dev_h100_eager", "--devices", "8", "--port", "0", "--json")
DEADLINES_S = {256: 2.0, 512: 2.6, 1024: 3.9, 2048: 7.8}
RATE_PER_S = 0.75
WARM_S, FRAMES, FRAME_S = 14.0, 40, 0.4
SIZE, CROP, WIDTH, COLOURS = (1000, 760), (0, 0, 1000, 665), 840, 64


def send(url: str, rng: Random) -> None:
    """Send images of random sizes, as long as the process runs; those that are refused are left."""

    def ask(side: int) -> None:
        body = {"prompt": "a lighthouse at dusk", "size": f"{side}x{side}", "slo_s": DEADLINES_S[side], "steps": 20}
        with suppress(httpx.HTTPError):  # The server ends before the last of them.
            httpx.post(f"{url}/v1/images/generations", json=body, timeout=300)

    while True:
        threading.Thread(target=ask, args=(rng.choice((256, 512, 1024, 1024, 2048)),), daemon=True).start()
        time.sleep(rng.expovariate(RATE_PER_S))


def frames(url: str) -> list[Image.Image]:
    """Return screenshots of the page, in order."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.goto(f"{url}/#live")
        time.sleep(WARM_S)
        found = []
        for _ in range(FRAMES):
            began_s = time.monotonic()
            found.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB").crop(CROP))
            time.sleep(max(0.0, FRAME_S - (time.monotonic() - began_s)))
        browser.close()
    return found


def animation(pictures: list[Image.Image]) -> bytes:
    """Return a looping GIF in one palette for all frames."""
    height = round(pictures[0].height * WIDTH / pictures[0].width)
    small = [one.resize((WIDTH, height), Image.Resampling.LANCZOS) for one in pictures]
    some = small[:: max(1, len(small) // 4)]
    sheet = Image.new("RGB", (WIDTH, height * len(some)))
    for place, one in enumerate(some):
        sheet.paste(one, (0, place * height))
    palette = sheet.quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    plain = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in small]
    out = io.BytesIO()
    plain[0].save(out, "GIF", save_all=True, append_images=plain[1:], duration=round(FRAME_S * 1000), loop=0)
    return out.getvalue()


def main() -> None:
    with subprocess.Popen([sys.executable, "-m", "tilework", *SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            threading.Thread(target=send, args=(url, Random(3)), daemon=True).start()
            gif = animation(frames(url))
        finally:
            server.terminate()
    with open(sys.argv[1], "wb") as file:
        file.write(gif)
    print(f"{sys.argv[1]}: {len(gif) / 1e6:.2f} MB, {FRAMES} frames")


if __name__ == "__main__":
    main()
