"""The routes for orchestrators, monitoring and other sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tilework.server.api.examples import LIVE
from tilework.server.api.openapi import errors, good, stream, text
from tilework.server.calls.readiness import Readiness
from tilework.server.config import ServerConfig
from tilework.server.http.errors import ApiError
from tilework.server.http.middleware import METRICS, key_of, tenant_of, tenants_of
from tilework.server.http.sse import MEDIA_TYPE, EventStream
from tilework.server.live.frames import Viewer
from tilework.server.live.watchers import MOST_WATCHERS, TooManyWatch, Watchers
from tilework.server.metrics.metrics import Metrics
from tilework.server.planning.service import PlanService
from tilework.server.schema.answers import Alive, NodeModel, ReadyModel, SetList, SetModel
from tilework.server.schema.live import LiveState
from tilework.server.schema.plan import PlanState
from tilework.server.sets import Sets
from tilework.server.tenants import CurrentTenants, Tenant, Tenants
from tilework.sets.directory import Directory
from tilework.sets.records import SetRecord


def add_probe_routes(app: FastAPI, readiness: Readiness, metrics: Metrics) -> None:
    @app.get("/health", tags=["operations"], responses={200: good("Alive"), **errors()})
    async def health() -> Alive:
        """Answer 200 while the process is alive, also while it loads its models."""
        return Alive()

    @app.get(
        "/ready",
        tags=["operations"],
        responses={
            200: good("Ready"),
            **errors(),
        },
    )
    async def ready() -> ReadyModel:
        """Answer 200 if the models are loaded, at least one device is up, and the server is not stopping."""
        return readiness.report()

    @app.get(
        METRICS,
        tags=["operations"],
        response_class=Response,
        responses={
            200: text("Metrics", "text/plain", 'tilework_requests_total{class="standard",outcome="done"} 12.0\n'),
            **errors(401),
        },
    )
    async def read_metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True, slots=True)
class LiveService:
    """Answers `/v1/live`: once, or twice a second as events."""

    watchers: Watchers
    config: ServerConfig
    tenants: CurrentTenants

    def answer(self, http: Request) -> Response:
        """Answer with the state, or with a stream of it. Raises ApiError if as many clients watch as may."""
        viewer = _viewer(tenants_of(http.scope), tenant_of(http.scope))
        if MEDIA_TYPE not in http.headers.get("accept", ""):
            return JSONResponse(self.watchers.state(viewer))
        try:
            self.watchers.enter()
        except TooManyWatch:
            raise _crowded() from None
        leave = self.watchers.leave
        events = self.watchers.events(viewer, lambda: self._viewer_with(key_of(http.scope)) == viewer)
        return EventStream(events, keep_alive_s=self.config.keep_alive_s, on_close=leave)

    def _viewer_with(self, key: bytes) -> Viewer | None:
        """Return what a client with this key may see by now; None if the key is known no more."""
        tenant = self.tenants.value.find(key)
        return None if tenant is None else _viewer(self.tenants.value, tenant)


def _viewer(tenants: Tenants, tenant: Tenant) -> Viewer:
    return Viewer(None if tenant.is_admin or not tenants.has_keys else tenant.name)


def _crowded() -> ApiError:
    message = (
        f"{MOST_WATCHERS} clients watch this server already. Ask without Accept: {MEDIA_TYPE}, or try again later."
    )
    headers = {"Retry-After": "10"}
    return ApiError(429, message, error_type="rate_limit_error", code="too_many_watchers", headers=headers)


def add_live_route(app: FastAPI, live: LiveService) -> None:
    answer = good("The state")
    answer["content"] |= stream("", LIVE)["content"]

    @app.get(
        "/v1/live",
        tags=["operations"],
        response_model=LiveState,
        responses={200: answer, **errors(401, 429)},
    )
    async def live_state(http: Request) -> Response:
        """Return what devices do, what waits and what was on time. `Accept: text/event-stream` gets it twice a second.

        Requests of other tenants are shown as tiles alone, unless the key has the scope admin.
        """
        return live.answer(http)


def add_plan_route(app: FastAPI, plans: PlanService) -> None:
    @app.get(
        "/v1/plan",
        tags=["operations"],
        responses={200: good("The plan, or its progress"), **errors(400, 401, 403, 409, 429)},
    )
    async def plan(
        http: Request,
        target: Annotated[str, Query(description="Share of the deadlines to keep, from 0.01 to 0.999")] = "0.95",
    ) -> PlanState:
        """Return how many devices keep a share of the deadlines, by simulation of the traffic of the latest hour.

        The plan is made beside the server, at low priority. Ask again until `status` is `done`. On a server with keys
        this needs the scope admin.
        """
        return plans.answer(http, target)


def add_set_routes(app: FastAPI, sets: Sets) -> None:
    @app.get("/v1/sets", tags=["operations"], responses={200: good("The sets"), **errors(401)})
    async def list_sets() -> SetList:
        """List this server and those that share its registry: what they serve, how busy they are, and their nodes."""
        directory = sets.directory
        known = {**directory.sets, sets.name: sets.own.record()}
        leader = directory.leader
        return SetList(
            data=[_card(name, known[name], directory) for name in sorted(known)],
            own=sets.name,
            node_manager=None if leader is None else leader.set,
            is_current=directory.is_current,
        )


def _card(name: str, record: SetRecord, directory: Directory) -> SetModel:
    return SetModel(
        name=name,
        url=record.url,
        models=list(record.models),
        is_open=record.is_open,
        devices_up=record.devices_up,
        backlog_s=record.backlog_s,
        start_in_s=record.start_in_s,
        window_s=record.measured_s,
        utilisation=record.share,
        stages=dict(record.stages),
        nodes=_nodes(name, record, directory),
        most_nodes=record.most_nodes,
    )


def _nodes(name: str, record: SetRecord, directory: Directory) -> list[NodeModel]:
    """Return the nodes that work for a set, and those that are on their way to it."""
    routes = {agent: route for agent, route in directory.routes.items() if route.set == name}
    found = []
    for agent in sorted({*record.nodes, *routes}):
        route = routes.get(agent)
        found.append(
            NodeModel(
                name=agent,
                utilisation=record.nodes.get(agent),
                epoch=None if route is None else route.epoch,
                why=None if route is None else route.why,
            )
        )
    return found
