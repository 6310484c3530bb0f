"""The document of `tilework compare --json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import tilework
from tilework.core.time import NS_PER_MS
from tilework.cost.table_file import read_table
from tilework.sim.workloads.cells import Cell
from tilework_lab.compare.figures import Figures
from tilework_lab.compare.overall import Overall, overall_of
from tilework_lab.compare.promises import PromiseCell, PromiseCounts, promise_overall, total
from tilework_lab.compare.runs import Conditions
from tilework_lab.compare.summary import FIGURES, CellSummary, Estimate, PolicySummary


def document_of(cells: Sequence[CellSummary], conditions: Conditions, num_processes: int) -> dict[str, Any]:
    """Return the whole comparison; lab/docs/compare.md lists the fields. An infinite or unknown value is null."""
    return {
        **_head(conditions, num_processes),
        "cells": [_cell_document(cell) for cell in cells],
        "overall": [_overall_document(one) for one in overall_of(cells)] if cells else [],
    }


def _head(conditions: Conditions, num_processes: int) -> dict[str, Any]:
    return {
        "simulated": True,
        "version": tilework.__version__,
        "jitter": conditions.jitter,
        "switch_ms": conditions.switch_ns / NS_PER_MS,
        "processes": num_processes,
    }


def promises_document(
    cells: Sequence[PromiseCell], asking: float, conditions: Conditions, num_processes: int
) -> dict[str, Any]:
    """Return the whole comparison of `--promises`; `asking` is the share that asks."""
    return {
        **_head(conditions, num_processes),
        "promises": asking,
        "cells": [
            {
                **_setting(cell.cell),
                "requests": cell.num_requests,
                "seeds": cell.num_seeds,
                "policies": {policy: _counts_document(total(counts)) for policy, counts in cell.policies.items()}
                | {policy: {"error": error} for policy, error in cell.errors.items()},
            }
            for cell in cells
        ],
        "overall": [
            {"policy": one.policy, **_counts_document(one.counts), "worst": one.worst, "worst_in": one.worst_in}
            for one in (promise_overall(cells) if cells else ())
        ],
    }


def _counts_document(counts: PromiseCounts) -> dict[str, Any]:
    eta = {"best_effort": asdict(counts.eta_before), "promises": asdict(counts.eta_after)}
    return {
        "with_deadline": counts.num_due,
        "best_effort_on_time": counts.before,
        "on_time": counts.after,
        "of_best_effort": counts.ratio,
        "asked": counts.asked,
        "accepted": counts.accepted,
        "asked_and_best_effort_on_time": counts.fitting,
        "accepted_of_these": counts.fitting_accepted,
        "kept": counts.kept,
        "broken": counts.broken,
        "others": counts.others,
        "others_best_effort_on_time": counts.others_before,
        "others_on_time": counts.others_after,
        "eta": eta,
    }


def _cell_document(summary: CellSummary) -> dict[str, Any]:
    return {
        **_setting(summary.cell),
        "requests": summary.num_requests,
        "with_deadline": summary.num_due,
        "bound": _estimate_document(summary.bound),
        "leading": summary.leading,
        "policies": {one.policy: _policy_document(summary, one) for one in summary.policies},
    }


def _setting(cell: Cell) -> dict[str, Any]:
    """Return the parts of a cell as JSON."""
    return {
        "name": cell.name,
        "section": cell.section,
        "workload": cell.source,
        "parameters": cell.parameters,
        "cost": cell.table,
        "true_cost": cell.true_table or cell.table,
        "devices": cell.num_devices,
        "devices_per_node": cell.devices_per_node or read_table(cell.table).devices_per_node,
    }


def _policy_document(summary: CellSummary, one: PolicySummary) -> dict[str, Any]:
    if one.error:
        return {"error": one.error}
    document: dict[str, Any] = {figure.name: _estimate_document(one.estimates.get(figure.name)) for figure in FIGURES}
    runs = [record.result for record in summary.records[one.policy] if isinstance(record.result, Figures)]
    return document | {
        "lead": None if one.lead is None else {"over": one.rival} | (_estimate_document(one.lead) or {}),
        "unserved": [run.num_unserved for run in runs],
        "moved": [run.num_moved for run in runs],
        "by_size": [
            {size: {name: _finite(value) for name, value in asdict(of).items()} for size, of in run.by_size.items()}
            for run in runs
        ],
    }


def _estimate_document(found: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as JSON; `low` and `high` are the 95% interval, null with one seed."""
    if found is None:
        return None
    low, high = (None, None) if found.half is None else (found.mean - found.half, found.mean + found.half)
    return {"mean": _finite(found.mean), "low": low, "high": high, "values": [_finite(one) for one in found.values]}


def _overall_document(one: Overall) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "attainment": _estimate_document(one.attainment),
        "of_bound": _estimate_document(one.of_bound),
        "worst": one.worst,
        "worst_cell": one.worst_cell,
        "slowdown": None if one.slowdown is None else _finite(one.slowdown),
        "best_in": one.num_best,
        "plan_p50_ms": one.plan_p50_ms,
        "plan_p99_ms": one.plan_p99_ms,
        "by_section": one.by_section,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
