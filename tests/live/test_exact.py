"""Exact requests on real workers in bfloat16 under load: the stock pipeline's pictures, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilework
import tiny
from batching import batching  # noqa: F401
from runtime.rig import Rig, assert_nothing_is_left
from stages import DIFFUSE
from tilework.control.log import replay
from tilework.core.model import ModelSource
from tilework.core.request import Status

DTYPE = "bfloat16"
COUNT = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory, "euler")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["batches", "fixed-sp2"])
def test_exact_requests_are_the_stock_pipelines_while_others_share_and_differ(directory: Path, policy: str) -> None:
    """`batches` lets all share that may, `fixed-sp2` gives each two devices. Every third request is exact."""
    rig = Rig(ModelSource(path=str(directory), dtype=DTYPE), policy)
    try:
        rig.start()
        (info,) = rig.engine.models.values()
        assert (info.dtype, info.attention_backend) == (DTYPE, "native")
        specs = {
            f"r{index}": tiny.spec(height=(64, 96, 128)[index % 3], seed=index, steps=6, exact=index % 3 == index // 4)
            for index in range(COUNT)
        }
        outcomes = rig.outcomes(specs)
        assert_nothing_is_left(rig.engine)
        assert replay(rig.log.getvalue().splitlines())[1] is None
    finally:
        rig.close()
    pipeline = tilework.reference(str(directory), dtype=DTYPE)
    differing = set()
    for outcome in outcomes:
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        spec = specs[outcome.uid]
        is_equal = np.array_equal(tiny.pixels(outcome.image), tiny.run_stock(pipeline, spec).pixels)
        assert is_equal or not spec.exact, f"the exact {outcome.uid} differs"
        if not is_equal:
            differing.add(outcome.uid)
        if spec.exact:
            assert all(segment.is_exact for segment in outcome.segments)
    others = [one for outcome in outcomes if not specs[outcome.uid].exact for one in outcome.segments]
    assert any(one.batch > 1 or len(one.devices) > 1 for one in others if one.stage == DIFFUSE)
    assert differing, "a shared pass and a group change a picture in bfloat16"
