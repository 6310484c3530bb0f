"""Calls with any options at once, for models of several kinds on two workers: each is answered, and nothing breaks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import tiny
from live.pages import live_server
from live.test_workflows import costs_of
from quick import quick
from tilework.control.log import replay
from tilework.cost.table import merged
from tilework.cost.table_file import table_json
from waiting import PATIENCE_S, eventually, until

pytestmark = pytest.mark.slow

SEED = 20261127
NUM_CALLS = 100
SIDES = {"shapes": (64, 128, 192), "shapes-motion": (32, 48, 64), "sd3": (32, 64), "flux": (32, 64), "sdxl": (32, 64)}
CACHES = ("patch", "image", "fbcache", "taylorseer", "if_late", "off")
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Served:
    url: str
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("models")
    builders = {"sd3": tiny.build_sd3, "flux": tiny.build_flux, "sdxl": tiny.build_sdxl}
    for name, build in builders.items():
        tiny.save(build(), directory / name, name)
    log, costs = directory / "events.jsonl", directory / "costs.json"
    tables = [costs_of(path) for path in ("shapes", *(str(directory / name) for name in builders))]
    tables.append(costs_of("shapes-motion", frames=9))
    costs.write_text(json.dumps(table_json(merged(tables))))
    tinies = [f"{name}={directory / name}" for name in builders]
    with live_server(
        "shapes", "shapes-motion", *tinies, "--device", "cpu", "--devices", "2", "--cost", str(costs), "--log", str(log)
    ) as url:
        yield Served(url, log)


def body(random: Random) -> dict[str, Any]:
    """A call with some of the options, most of them valid together."""
    model = random.choice(list(SIDES))
    drawn: dict[str, tuple[float, tuple[Any, ...]]] = {
        "num_inference_steps": (1, (1, 2, 4, 8, 20)),
        "n": (0.3, (1, 2, 4)),
        "guidance_scale": (0.3, (0, 1, 4, 7.5)),
        "negative_prompt": (0.2, ("blue", "")),
        "exact": (0.3, (True, False)),
        "cache": (0.5, CACHES),
        "cache_threshold": (0.1, (0, 0.05, 1)),
        "slo_s": (0.6, (0.05, 0.5, 2, 10)),
        "on_miss": (0.5, ("best_effort", "reject", "drop")),
        "output_format": (0.3, ("png", "jpeg", "webp")),
        "response_format": (0.2, ("url", "b64_json")),
        "stream": (0.2, (True,)),
        "partial_images": (0.1, (0, 2)),
        "preview_every": (0.2, (0, 2)),
    }
    chosen = {name: random.choice(values) for name, (share, values) in drawn.items() if random.random() < share}
    width, height = (random.choice(SIDES[model]) for _ in range(2))
    return {"prompt": "a red circle", "model": model, "size": f"{width}x{height}", "seed": random.randrange(9)} | chosen


async def answered(client: httpx.AsyncClient, random: Random) -> tuple[dict[str, Any], int, str]:
    """A call, its status, and its answer. One in ten clients goes away, and so does one in ten not wait."""
    call, way = body(random), random.random()
    path = "/v1/images/generations"
    if call["model"] == "shapes-motion" and random.random() < 0.5:
        path = "/v1/videos/sync"
        call = {name: call[name] for name in call.keys() - {"output_format", "response_format", "stream", "n"}}
    headers = {"Prefer": "respond-async"} if way < 0.1 and path.endswith("generations") else {}
    try:
        answer = await client.post(path, json=call, headers=headers, timeout=0.2 if way > 0.9 else PATIENCE_S)
    except httpx.ReadTimeout:
        assert way > 0.9, call
        return call, 0, ""
    if answer.status_code == 202:
        uid = answer.json()["uid"]
        states: list[dict[str, Any]] = []

        async def has_ended() -> bool:
            states.append((await client.get(f"/v1/requests/{uid}")).json())
            return states[-1]["status"] in ENDED

        await until(has_ended)
        return call, 202, "" if states[-1]["status"] == "done" else str(states[-1]["error"])
    return (
        call,
        answer.status_code,
        answer.text if answer.headers["content-type"].startswith("application/json") else "",
    )


async def all_answered(url: str, at_once: int, hundred: int) -> list[tuple[dict[str, Any], int, str]]:
    turns = asyncio.Semaphore(at_once)

    async def one(index: int) -> tuple[dict[str, Any], int, str]:
        async with turns:
            return await answered(client, Random(f"{SEED}-{at_once}-{index}"))

    async with httpx.AsyncClient(base_url=url) as client:
        indices = range(hundred * NUM_CALLS, (hundred + 1) * NUM_CALLS)
        return await asyncio.gather(*(one(index) for index in indices))


@pytest.mark.parametrize("at_once", quick([8], [1, 8]))
@pytest.mark.parametrize("hundred", quick([0], range(2)))
def test_calls_with_any_options_end_and_break_nothing(server: Served, at_once: int, hundred: int) -> None:
    """One by one they get all devices; many share them."""
    calls = asyncio.run(all_answered(server.url, at_once, hundred))
    statuses = Counter(status for _, status, _ in calls)
    assert statuses.keys() <= {0, 200, 202, 400, 429, 504}, [one for one in calls if one[1] >= 500 and one[1] != 504]
    assert statuses[200] > NUM_CALLS / 3, "most options go together"
    used = {call.get("cache") for call, status, _ in calls if status == 200}
    assert used >= set(CACHES), "each cache was used"
    eventually(lambda: httpx.get(f"{server.url}/ready").json()["open_requests"] == 0)  # Of clients that went away.
    lines = server.log.read_text("utf-8").splitlines()
    actions = [action for line in lines[1:] for action in json.loads(line).get("actions", ())]
    assert Counter(one["uid"] for one in actions if one["is"] == "Accept") == Counter(
        one["uid"] for one in actions if one["is"] == "Finish"
    ), "each accepted request has ended once"
    assert '"is":"DeviceLost"' not in server.log.read_text("utf-8")
    assert replay(lines)[1] is None
