"""How long runs took, over what the cost table of their event log says."""

from __future__ import annotations

from statistics import median

from tilework.control.history import History
from tilework.cost.corrections import deviation
from tilework.cost.table_costs import TableCosts
from tilework.report.pages.stage_times import StageTime


def stage_times(history: History) -> tuple[StageTime, ...]:
    """By model and stage, from runs of one request; without those with previews or further passes, which take longer
    than their steps."""
    costs = TableCosts(history.header.table)
    requests = {past.job_id: past.request for past in history.requests}
    ratios: dict[tuple[str, str], list[float]] = {}
    for past in history.works:
        stage, request = past.work.stage, requests[past.work.job_ids[0]]
        if past.run_ns is None or past.predicted_ns is None or len(past.work.job_ids) > 1:
            continue
        if request.preview_every or request.passes != 1:
            continue
        expected_ns = costs.work_ns(stage, (request,), len(past.work.devices), past.steps)
        if expected_ns:
            ratios.setdefault((stage.pipeline, stage.name), []).append(past.run_ns / expected_ns)
    return tuple(
        StageTime(
            model=model, stage=stage, num_runs=len(found), ratio=median(found), is_off=deviation(found) is not None
        )
        for (model, stage), found in ratios.items()
    )
