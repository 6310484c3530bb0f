"""Requests for what was encoded before begin behind their encode, on real workers; their pictures are stock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import tilework
import tiny
from builders import table
from runtime.rig import Rig, assert_nothing_is_left, kill, left_behind
from tilework.control.log import replay
from tilework.core.checkpoint import Checkpoint
from tilework.core.model import ModelSource
from tilework.core.request import Status
from tilework.core.wire.spec import Spec
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until
from zoo import requests
from zoo.registry import ZOO, build, quiet

pytestmark = pytest.mark.slow

ROOM = 64 << 20


@dataclass(frozen=True)
class Served:
    """A model on two workers, a request for it, and its stock pipeline."""

    rig: Rig
    spec: Spec
    stock: Any
    is_zoo: bool

    def picture(self, spec: Spec) -> np.ndarray:
        if not self.is_zoo:
            return tiny.run_stock(self.stock, spec).pixels
        asked = replace(ZOO["z-image"], inputs={**ZOO["z-image"].inputs, "prompt": spec.prompt})
        return requests.stock_pixels(asked, self.stock, spec.seed)

    def draw(self, uid: str, spec: Spec) -> Outcome:
        """A picture; it is the stock pipeline's."""
        outcome = self.rig.run(self.rig.outcome(spec, uid))
        self.check(outcome, spec)
        return outcome

    def check(self, outcome: Outcome, spec: Spec) -> None:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        assert np.array_equal(np.frombuffer(outcome.image.pixels, np.uint8), self.picture(spec).reshape(-1))


@pytest.fixture(scope="module", params=["sd3", "z-image"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tiny.prepare()
    directory, is_zoo = tmp_path_factory.mktemp(request.param), request.param == "z-image"
    if is_zoo:
        model = ZOO[request.param]
        build(model).save_pretrained(str(directory), safe_serialization=True)
        tiny.write_defaults(directory, height=64, width=64)
        spec = requests.spec_of(model, StockPipeline(build(model), model.name, {}, ""), 7)
    else:
        tiny.save_sd3(directory)
        spec = tiny.spec()
    costs = table(pipeline=directory.name) if is_zoo else None
    rig = Rig(ModelSource(path=str(directory)), "edf", costs=costs, encode_cache_bytes=ROOM)
    try:
        rig.start()
        stock = tilework.reference(str(directory))
        quiet(stock)
        yield Served(rig, spec, stock, is_zoo)
    finally:
        rig.close()


def stages(outcome: Outcome) -> set[str]:
    return {segment.stage for segment in outcome.segments}


def test_a_prompt_is_encoded_once_and_pictures_are_stock(served: Served) -> None:
    spec, usage = replace(served.spec, prompt="once"), served.rig.engine.status.usage
    assert "encode" in stages(served.draw("first", spec))
    for seed in (8, 9):
        assert "encode" not in stages(served.draw(f"again{seed}", replace(spec, seed=seed)))
    assert "encode" in stages(served.draw("other", replace(spec, prompt="another")))
    assert usage().encode_cache.num_hits == 2
    assert usage().encode_cache.num_bytes > 0
    served.rig.wait_until_idle()
    lines = served.rig.log.getvalue().splitlines()
    positions = [json.loads(line)["event"].get("positions") for line in lines[1:]]
    assert positions.count([1]) == 2, "the log says where they began"
    assert replay(lines)[1] is None


def test_a_request_that_begins_behind_its_encode_survives_the_loss_of_its_worker(served: Served) -> None:
    """It starts from the same blob again, and the cache still has its own."""
    spec = replace(served.spec, prompt="killed")
    served.draw("before", spec)
    rig, again = served.rig, replace(spec, seed=11)

    async def killed() -> Outcome:
        ticket = rig.submit(again, "killed")
        assert isinstance(ticket, Ticket)
        await until(lambda: ticket.steps_done)
        kill(rig, 0)
        return await ticket.outcome

    served.check(rig.run(killed()), again)
    assert "encode" not in stages(served.draw("after", replace(spec, seed=12)))


def test_a_ticket_says_where_its_request_began(served: Served) -> None:
    """A durable server keeps this with the call: later states alone would be of no use to its next start."""
    spec = replace(served.spec, prompt="durable")

    async def began(uid: str, seed: int) -> Checkpoint:
        ticket = served.rig.submit(replace(spec, seed=seed), uid)
        assert isinstance(ticket, Ticket)
        await ticket.outcome
        return ticket.checkpoint

    assert served.rig.run(began("encoded", 4)) == Checkpoint()
    (state,) = served.rig.run(began("not encoded", 5)).states
    assert (state.index, state.position) == (0, 1)


def test_a_request_that_is_cancelled_or_refused_leaves_no_file(served: Served) -> None:
    spec, rig = replace(served.spec, prompt="cancelled"), served.rig
    served.draw("known", spec)
    rig.wait_until_idle()
    before = {path.name for path in left_behind(rig.executor)}

    async def cancelled() -> Outcome:
        ticket = rig.submit(replace(spec, seed=3), "cancelled")
        assert isinstance(ticket, Ticket)
        rig.engine.cancel("cancelled", "not wanted")
        return await ticket.outcome

    assert rig.run(cancelled()).status is Status.CANCELLED
    rig.wait_until_idle()
    assert {path.name for path in left_behind(rig.executor)} == before
    rig.engine._encode_cache.clear()
    assert_nothing_is_left(rig.engine)
