"""Answers how many devices the recent traffic needs, for clients that may know all of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tilework.server.calls.readiness import Readiness
from tilework.server.http.errors import ApiError, invalid
from tilework.server.http.middleware import tenant_of, tenants_of
from tilework.server.planning.planner import LEAST_DUE, CapacityPlanner, PlanJob, PlannerBusy, TooLittleTraffic
from tilework.server.schema.plan import PlanErrorModel, PlanPoint, PlanResult, PlanState, PlanUse

LOWEST = 0.01
HIGHEST = 0.999


@dataclass(frozen=True, slots=True)
class PlanService:
    """Answers `/v1/plan` for clients that may see all of the traffic."""

    planner: CapacityPlanner
    readiness: Readiness

    def answer(self, http: Request, text: str) -> PlanState:
        """Return the plan for a target, or its progress. Raises ApiError."""
        self.readiness.require()
        if tenants_of(http.scope).has_keys and not tenant_of(http.scope).is_admin:
            raise ApiError(
                403,
                "This key may not see the traffic of all tenants. Send one with the scope admin: TILEWORK_ADMIN_KEY, "
                "or admin = true in the file of tenants.",
                code="permission_denied",
            )
        try:
            return _state(self.planner.plan(_target(text)))
        except PlannerBusy:
            headers = {"Retry-After": "10"}
            message = "A plan for another target is being made. Ask for this one when it is done."
            raise ApiError(429, message, error_type="rate_limit_error", code="planner_busy", headers=headers) from None
        except TooLittleTraffic as error:
            message = (
                f"{error.num_due} requests with a deadline have come and ended in the latest hour, and a plan needs "
                f"{LEAST_DUE}. Send deadlines (slo_s), or start the server with --default-slo, and ask again later."
            )
            raise ApiError(409, message, code="too_little_traffic", headers={"Retry-After": "60"}) from None


def _target(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LOWEST <= value <= HIGHEST:
        raise invalid("target", text, f"Give a share of deadlines from {LOWEST} to {HIGHEST}, such as 0.95.")
    return value


def _state(job: PlanJob) -> PlanState:
    status = "running" if job.ended_ns is None else "failed" if job.document is None else "done"
    traffic = job.traffic
    return PlanState(
        status=status,
        target=job.target,
        devices_now=job.num_devices,
        num_requests=traffic.num_requests,
        num_due=traffic.num_due,
        span_s=traffic.span_s,
        simulations=job.num_simulations,
        result=None if job.document is None else _result(job.document),
        error=job.error or None,
    )


def _result(document: dict[str, Any]) -> PlanResult:
    """Return the part of a document of `tilework plan --json` that is for one hardware."""
    (own,) = document["hardware"]
    error = document["error"]
    return PlanResult(
        devices=own["devices"],
        devices_in_the_mean=own["devices_in_the_mean"],
        load=own["load"],
        least=own["least"],
        points=[PlanPoint(**{name: one[name] for name in PlanPoint.model_fields}) for one in own["points"]],
        uses=[PlanUse(**one) for one in own["uses"]],
        error=PlanErrorModel(**{name: error[name] for name in PlanErrorModel.model_fields}),
        wall_s=document["wall_s"],
    )
