"""A worker refuses works that would make an exact request's picture differ from the stock pipeline's."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import tiny
from commands import decode, encode, steps
from tilework.core.model import ATTENTIONS
from tilework.core.wire.commands import GroupRef
from tilework.core.wire.reports import Ended, Failed
from tilework.core.wire.spec import Spec
from tilework.pipelines.families.sd3 import StableDiffusion3
from tilework.pipelines.numerics import pin_numerics
from tilework.worker.exact import NotExact, check_exact
from worker.worker_bench import WorkerBench

EXACT, OTHER = 1, 2


@pytest.fixture
def bench(tmp_path: Path) -> WorkerBench:
    """One on which an exact request and another one are encoded."""
    tiny.prepare()
    family = StableDiffusion3(tiny.build_sd3("euler"), "tiny", {"max_sequence_length": tiny.TEXT_LENGTH}, "")
    bench = WorkerBench(family, tmp_path)
    bench.run(encode(1, EXACT, tiny.spec(exact=True)), encode(2, OTHER, tiny.spec(seed=8)))
    return bench


def test_an_exact_request_shares_no_forward_pass_and_is_not_decoded_in_slices(bench: WorkerBench) -> None:
    [shared] = bench.run(steps(3, ((OTHER, 0), (EXACT, 0)), 4))
    assert isinstance(shared, Failed)
    assert shared.reason == "NotExact: the request is exact, and would run together with others"
    bench.run(encode(4, EXACT, tiny.spec(exact=True)), steps(5, ((EXACT, 0),), 4))
    [sliced] = bench.run(decode(6, EXACT, sliced=True))
    assert isinstance(sliced, Failed)
    assert sliced.reason == "NotExact: the request is exact, and would run in slices"


def test_an_exact_request_alone_is_drawn(bench: WorkerBench) -> None:
    *_, end = bench.run(steps(3, ((EXACT, 0),), 4), decode(4, EXACT))
    assert isinstance(end, Ended)
    assert end.images.keys() == {EXACT}


def test_an_exact_request_runs_in_no_group() -> None:
    grouped = steps(7, ((EXACT, 0),), 4, group=GroupRef(1, (0, 1)))
    exact: Spec = tiny.spec(exact=True)
    with pytest.raises(NotExact, match="would run on 2 devices"):
        check_exact(exact, grouped)
    check_exact(tiny.spec(), grouped)


def test_the_attention_back_end_is_the_stock_one_whatever_the_environment_says() -> None:
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName._NATIVE_MATH)
    pin_numerics(1)
    active, _ = _AttentionBackendRegistry.get_active_backend()
    assert active is AttentionBackendName.NATIVE
    assert ATTENTIONS[0] == "native"
