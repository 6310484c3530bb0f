"""The document of `tilework compare --json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import tilework
from tilework.core.time import NS_PER_MS
from tilework.cost.table_file import read_table
from tilework.sim.compare.figures import Figures
from tilework.sim.compare.overall import Overall, overall_of
from tilework.sim.compare.runs import Conditions
from tilework.sim.compare.summary import FIGURES, CellSummary, Estimate, PolicySummary


def document_of(cells: Sequence[CellSummary], conditions: Conditions, num_processes: int) -> dict[str, Any]:
    """The whole comparison; docs/compare.md lists the fields. An infinite or unknown value is null."""
    return {
        "simulated": True,
        "version": tilework.__version__,
        "jitter": conditions.jitter,
        "switch_ms": conditions.switch_ns / NS_PER_MS,
        "processes": num_processes,
        "cells": [_cell_document(cell) for cell in cells],
        "overall": [_overall_document(one) for one in overall_of(cells)] if cells else [],
    }


def _cell_document(summary: CellSummary) -> dict[str, Any]:
    cell = summary.cell
    return {
        "name": cell.name,
        "section": cell.section,
        "workload": cell.source,
        "parameters": cell.parameters,
        "cost": cell.table,
        "true_cost": cell.true_table or cell.table,
        "devices": cell.num_devices,
        "devices_per_node": cell.devices_per_node or read_table(cell.table).devices_per_node,
        "requests": summary.num_requests,
        "with_deadline": summary.num_due,
        "bound": _estimate_document(summary.bound),
        "leading": summary.leading,
        "policies": {one.policy: _policy_document(summary, one) for one in summary.policies},
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
    """`low` and `high` are the 95% interval, null with one seed."""
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
