"""Batches on real workers: mixed sizes, steps and guidance in one forward pass, every picture the stock pipeline's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tiny
from batching import batching  # noqa: F401
from quick import quick
from runtime.rig import Rig, assert_nothing_is_left, kill
from stages import DIFFUSE, ENCODE, STAGES, stage_of
from tilework.control.log import read_log, replay
from tilework.core.actions import Accept
from tilework.core.cost_row import CostRow
from tilework.core.events import LeftOut, WorkFailed
from tilework.core.model import ModelSource, SimulatedSource
from tilework.core.request import Shape, Status
from tilework.core.wire.spec import Spec
from tilework.runtime.ticket import Outcome, Ticket
from waiting import until

pytestmark = pytest.mark.slow

BUILD = {
    "sd3-dpm": lambda: tiny.build_sd3("dpm"),
    "sd3-heun": lambda: tiny.build_sd3("heun"),
    "sdxl": lambda: tiny.build_sdxl("sdxl-ancestral"),
}
MODELS = tuple(BUILD)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny.prepare()
    directories = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, directory in directories.items():
        tiny.save(BUILD[name](), directory, name)
    return directories


@pytest.fixture(scope="module")
def start(models: dict[str, Path]) -> Iterator[Callable[..., Rig]]:
    """Starts rigs of two workers; all of them end with the module."""
    rigs: list[Rig] = []

    def start(name: str, policy: str = "batches") -> Rig:
        rig = Rig(ModelSource(path=str(models[name])), policy)
        rigs.append(rig)
        rig.start()
        return rig

    yield start
    for rig in rigs:
        rig.close()


def mixed_specs(name: str, count: int = 8, steps: int = 5) -> dict[str, Spec]:
    """Sizes that the model can pack, and one that a U-Net cannot; with and without guidance, of different length."""
    sizes = [(64, 64), (128, 64), (96, 96), (64, 64), (64, 96), (72 if name == "sdxl" else 80, 64)]
    return {
        f"r{index}": tiny.spec(
            height=sizes[index % 6][0],
            width=sizes[index % 6][1],
            seed=index,
            steps=steps + index % 4,
            guidance_scale=(4.0, 1.0, 2.5)[index % 3],
            negative_prompt=("", "blue")[index % 2],
            preview_every=(0, 2)[index % 2],
        )
        for index in range(count)
    }


def assert_stock(name: str, outcomes: list[Outcome], specs: dict[str, Spec]) -> None:
    """As test_patches_exact asks of batches: pixels differ by one at most, and few do; each step has run once."""
    pipeline = BUILD[name]()
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        spec = specs[outcome.uid]
        drawn, stock = tiny.pixels(outcome.image).astype(int), tiny.run_stock(pipeline, spec).pixels.astype(int)
        difference = np.abs(drawn - stock)
        assert difference.max() <= 1, f"{outcome.uid} differs"
        assert (difference > 0).mean() < 0.01, f"{outcome.uid} differs in many places"
        steps = [segment.num_steps for segment in outcome.segments if segment.stage == DIFFUSE]
        assert sum(steps) == spec.steps


def batches(outcomes: list[Outcome]) -> list[int]:
    return [one.batch for outcome in outcomes for one in outcome.segments if one.stage == DIFFUSE]


@pytest.mark.parametrize("policy", quick(("entangled",), ("entangled", "batches")))
@pytest.mark.parametrize("name", quick(("sdxl",), MODELS))
def test_pictures_of_mixed_batches_are_the_stock_pipelines(start: Callable[..., Rig], name: str, policy: str) -> None:
    rig, specs = start(name, policy), mixed_specs(name)
    outcomes = rig.outcomes(specs)
    assert_stock(name, outcomes, specs)
    assert max(batches(outcomes)) > 1
    assert {one.batch for outcome in outcomes for one in outcome.segments if one.stage != DIFFUSE} == {1}
    assert not left_out(rig), "stops and moves go together"
    assert replay(rig.log.getvalue().splitlines())[1] is None
    assert_nothing_is_left(rig.engine)


@pytest.mark.parametrize("policy", quick(("tilework",), ("patchedserve", "tilework")))
def test_policies_that_batch_draw_the_stock_pipelines_pictures(start: Callable[..., Rig], policy: str) -> None:
    rig, specs = start("sd3-dpm", policy), mixed_specs("sd3-dpm")
    outcomes = rig.outcomes(specs)
    assert_stock("sd3-dpm", outcomes, specs)
    assert not left_out(rig)
    assert_nothing_is_left(rig.engine)


def left_out(rig: Rig) -> set[str]:
    """Whose works failed, or ran without them."""
    _, entries = read_log(rig.log.getvalue().splitlines())
    uids: dict[int, str] = {}
    found: set[str] = set()
    for entry in entries:
        assert not isinstance(entry.event, WorkFailed), entry.event
        uids |= {action.job_id: action.uid for action in entry.actions if isinstance(action, Accept)}
        if isinstance(entry.event, LeftOut):
            found.add(uids[entry.event.job_id])
    return found


def submit(rig: Rig, specs: dict[str, Spec]) -> dict[str, Ticket]:
    tickets = {uid: rig.submit(spec, uid) for uid, spec in specs.items()}
    return {uid: ticket for uid, ticket in tickets.items() if isinstance(ticket, Ticket)}


def is_shared(ticket: Ticket) -> bool:
    """Whether it has been in a batch, and has still much to do."""
    return any(segment.batch > 1 for segment in ticket.segments) and ticket.steps_done < ticket.request.steps - 4


def test_a_member_that_is_cancelled_midway_costs_the_others_nothing(start: Callable[..., Rig]) -> None:
    rig, specs = start("sd3-dpm", "entangled"), mixed_specs("sd3-dpm", 6, steps=20)

    async def scenario() -> list[Outcome]:
        tickets = submit(rig, specs)
        gone = tickets["r2"]
        await until(lambda: is_shared(gone))
        rig.engine.cancel("r2", "not wanted")
        return [await ticket.outcome for ticket in tickets.values()]

    outcomes = rig.run(scenario())
    assert [outcome.uid for outcome in outcomes if outcome.status is Status.CANCELLED] == ["r2"]
    assert_stock("sd3-dpm", [outcome for outcome in outcomes if outcome.uid != "r2"], specs)
    assert left_out(rig) <= {"r2"}
    assert_nothing_is_left(rig.engine)
    assert replay(rig.log.getvalue().splitlines())[1] is None


@pytest.mark.parametrize("policy", ["batches", "entangled"])
def test_a_worker_that_is_killed_midway_loses_no_member(start: Callable[..., Rig], policy: str) -> None:
    rig, specs = start("sdxl", policy), mixed_specs("sdxl", 6, steps=20)

    async def scenario() -> list[Outcome]:
        tickets = submit(rig, specs)
        first = tickets["r0"]
        await until(lambda: is_shared(first))
        kill(rig, first.segments[-1].devices[0])
        return [await ticket.outcome for ticket in tickets.values()]

    outcomes = rig.run(scenario())
    assert_stock("sdxl", outcomes, specs)
    assert '"is":"DeviceLost"' in rig.log.getvalue()
    encodes = [
        one
        for outcome in outcomes
        for one in outcome.segments
        if one.stage == ENCODE and one.end_ns > one.start_ns  # Not those that were stopped in the queue.
    ]
    assert len(encodes) == len(specs), "one began anew"
    assert_nothing_is_left(rig.engine)
    assert replay(rig.log.getvalue().splitlines())[1] is None


def test_requests_that_do_not_fit_together_run_in_smaller_batches() -> None:
    """A large one takes 4 MB, a small one 1, and there are 9."""
    rows = [
        CostRow(pipeline="toy", stage=stage, height=side, width=side, seconds=0.002, peak_bytes=peak_bytes)
        for side, peak_bytes in ((64, 1_000_000), (128, 4_000_000))
        for stage in STAGES
    ]
    rig = Rig(
        SimulatedSource(pipeline="toy", hardware="none", steps=8, rows=tuple(rows), memory_bytes=9_000_000), "batches"
    )
    rig.start()
    sides = {f"r{index}": (128, 128, 64)[index % 3] for index in range(12)}
    outcomes = rig.outcomes({uid: tiny.spec(height=side, width=side, steps=8) for uid, side in sides.items()})
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert '"is":"OutOfMemory"' in rig.log.getvalue()
    assert 1 < max(batches(outcomes)) <= 4
    assert not left_out(rig)
    costs = rig.engine._controller.costs
    assert not costs.fits_together(stage_of("toy", DIFFUSE), [Shape(128, 128)] * 3)
    assert costs.fits(stage_of("toy", DIFFUSE), Shape(256, 256), 1), "of one alone that says nothing"
    assert_nothing_is_left(rig.engine)
    rig.close()


def test_each_member_is_shown_its_own_previews(start: Callable[..., Rig]) -> None:
    rig, specs = start("sd3-dpm"), mixed_specs("sd3-dpm", 4)
    seen: dict[str, set[tuple[int, int, int]]] = {uid: set() for uid in specs}

    async def scenario() -> None:
        tickets = submit(rig, specs)

        def look(uid: str) -> None:
            if (preview := tickets[uid].preview) is not None:
                seen[uid].add((preview.steps_done, preview.image.height, preview.image.width))

        for uid, ticket in tickets.items():
            ticket.watch(lambda uid=uid: look(uid))  # type: ignore[misc]
        for ticket in tickets.values():
            await ticket.outcome

    rig.run(scenario())
    for uid, spec in specs.items():
        due = range(2, spec.steps, 2) if spec.preview_every else ()
        assert seen[uid] == {(step, spec.height, spec.width) for step in due}
