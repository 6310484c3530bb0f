"""Groups as parts of their node's communicator, which gloo rehearses on CPUs: the same pictures, also after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from live.route import ROUTE, STEPS, Rig, left_behind, registered
from tilework.control.log import replay
from tilework.core.request import Status
from tilework.runtime.ticket import Outcome
from waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "dpm")
    with registered():
        yield directory


def drawn(rig: Rig, uid: str) -> tuple[list[torch.Tensor], np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """The latents after each chunk on the way over ROUTE, and the picture."""
    (outcome,) = rig.outcomes(**{uid: tiny.spec(steps=STEPS, height=80, width=112)})
    assert outcome.status is Status.DONE, outcome.reason
    assert outcome.image is not None
    return list(rig.executor.latents), tiny.pixels(outcome.image)


def test_pictures_are_those_of_sockets_bit_for_bit_also_after_a_worker_was_lost(directory: Path) -> None:
    """On one, two, three and four devices."""
    assert {len(group) for group in ROUTE} == {1, 2, 3, 4}
    by_sockets = Rig(directory, "tiny-sd3")
    latents, picture = drawn(by_sockets, "sockets")
    by_sockets.close()
    rig = Rig(directory, "tiny-sd3", "gloo")

    async def loss() -> Outcome:
        ticket = rig.submit(tiny.spec(steps=STEPS, height=80, width=112), "killed")
        await until(lambda: ticket.steps_done >= 5)  # On all four devices.
        rig.kill(3)
        outcome = await ticket.outcome
        await until(lambda: rig.is_whole)
        return outcome

    for uid in ("before", "after"):
        mine, same = drawn(rig, uid)
        assert np.array_equal(same, picture)
        assert len(mine) == len(latents)
        assert all(map(torch.equal, mine, latents))
        if uid == "before":
            outcome = rig.run(loss())
            assert outcome.status is Status.DONE, outcome.reason
            assert outcome.image is not None
            assert np.abs(tiny.pixels(outcome.image).astype(int) - picture).max() <= 1
    assert rig.engine._dispatcher.is_idle
    assert not left_behind(rig.executor)
    assert replay(rig.log.getvalue().splitlines())[1] is None
    rig.close()
