"""What a demo says of how long runs took: which stages are named, and which runs count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PIPELINE, request, table
from stages import DECODE, DIFFUSE, stage_of
from tilework.cli.views.schedules import stage_times
from tilework.control.controller import ControllerConfig
from tilework.control.history import History, PastRequest, PastWork
from tilework.control.log import LogHeader
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.core.work import Member, Work
from tilework.report.pages.demo_page import StageTime, stage_times_sentence, stage_times_table

TABLE = table(step_s=0.1, decode_s=0.2)
REQUESTS = (request("a"), replace(request("b"), preview_every=1), request("c"))


def work(stage: str, run_s: float | None, *, steps: int = 1, job_ids: tuple[int, ...] = (0,)) -> PastWork:
    made = Work(
        work_id=1,
        stage=stage_of(PIPELINE, stage),
        members=tuple(Member(job_id, 0, 1, 0) for job_id in job_ids),
        devices=(0,),
        num_steps=steps,
        why="",
    )
    run_ns = None if run_s is None else ns_from_s(run_s)
    return PastWork(work=made, start_ns=0, end_ns=NS_PER_S, steps=steps, run_ns=run_ns, predicted_ns=1)


def times(*works: PastWork, requests: tuple[Request, ...] = REQUESTS) -> tuple[StageTime, ...]:
    header = LogHeader(version="", config=ControllerConfig(), table=TABLE)
    past = tuple(PastRequest(request=one, job_id=job_id) for job_id, one in enumerate(requests))
    return stage_times(History(header=header, end_ns=NS_PER_S, works=works, requests=past))


def test_the_median_of_runs_is_compared_with_the_table_of_the_start() -> None:
    """However the controller predicted them by then. Runs of several steps have the time of these."""
    works = [work(DIFFUSE, run_s, steps=steps) for run_s, steps in ((0.4, 1), (0.3, 1), (1.2, 4), (9.0, 1), (0.6, 2))]
    steps, decode = times(*works, work(DECODE, 0.2))
    assert (steps.model, steps.stage, steps.num_runs, steps.is_off) == (PIPELINE, DIFFUSE, 5, True)
    assert (steps.ratio, decode.ratio) == (pytest.approx(3.0), pytest.approx(1.0))


def test_runs_that_are_not_of_single_requests_and_their_steps_alone_do_not_count() -> None:
    others = (work(DIFFUSE, 9.0, job_ids=(0, 2)), work(DIFFUSE, 9.0, job_ids=(1,)), work(DIFFUSE, None))
    (steps,) = times(work(DIFFUSE, 0.1), *others)
    assert (steps.num_runs, steps.ratio) == (1, pytest.approx(1.0))


def test_two_runs_are_too_few() -> None:
    assert [[one.is_off for one in times(*[work(DIFFUSE, 0.4)] * number)] for number in (2, 3)] == [[False], [True]]


def stage(name: str, ratio: float, model: str = "toy") -> StageTime:
    return StageTime(model=model, stage=name, num_runs=9, ratio=ratio, is_off=not 0.5 < ratio < 1.5)


@pytest.mark.parametrize(
    ("ratios", "beginning"),
    [
        ((1.2, 0.9), "runs took about as long as measured"),
        ((3.14, 1.2), "runs took longer than measured: 1 of 2 stages by more than half, diffuse of toy 3.1 times as"),
        ((0.4, 0.25), "runs took less time than measured: 2 of 2 stages by more than half, decode of toy 0.25 times"),
        (
            (3.0, 0.25),
            "runs took another time than measured: 2 of 2 stages by more than half, decode of toy 0.25 times",
        ),
    ],
)
def test_a_sentence_names_what_is_off_and_a_table_has_all(ratios: tuple[float, float], beginning: str) -> None:
    told = [stage(name, ratio) for name, ratio in zip((DIFFUSE, DECODE), ratios, strict=True)]
    sentence, listed = stage_times_sentence(told), stage_times_table(told)
    is_off = any(one.is_off for one in told)
    assert sentence.startswith(beginning)
    assert ("run it again when the machine is idle" in sentence) == is_off
    assert listed.count("<tr") == (3 if is_off else 0)
    assert listed.count('class="bad"') == sum(one.is_off for one in told)


def test_names_are_text() -> None:
    assert "<td>&lt;b&gt;</td>" in stage_times_table([stage(DIFFUSE, 2.0, model="<b>")])
