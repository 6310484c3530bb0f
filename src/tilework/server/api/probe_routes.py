"""The routes for orchestrators, monitoring and other sets."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from tilework.server.api.openapi import errors, good, text
from tilework.server.calls.readiness import Readiness
from tilework.server.metrics.metrics import Metrics
from tilework.server.schema.answers import Alive, NodeModel, ReadyModel, SetList, SetModel
from tilework.server.sets import Sets
from tilework.sets.directory import Directory
from tilework.sets.records import SetRecord


def add_probe_routes(app: FastAPI, readiness: Readiness, metrics: Metrics) -> None:
    @app.get("/health", tags=["operations"], responses={200: good("Alive", "alive"), **errors()})
    async def health() -> Alive:
        """The process is alive, also while it loads its models."""
        return Alive()

    @app.get(
        "/ready",
        tags=["operations"],
        responses={
            200: good("Ready", "ready"),
            **errors(),
        },
    )
    async def ready() -> ReadyModel:
        """The models are loaded, at least one device is up, and the server is not stopping."""
        return readiness.report()

    @app.get(
        "/metrics",
        tags=["operations"],
        response_class=Response,
        responses={
            200: text("Metrics", "text/plain", 'tilework_requests_total{class="standard",outcome="done"} 12.0\n'),
            **errors(401),
        },
    )
    async def read_metrics() -> Response:
        """Metrics in Prometheus' text format."""
        readiness.require_started()
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_set_routes(app: FastAPI, sets: Sets, readiness: Readiness) -> None:
    @app.get("/v1/sets", tags=["operations"], responses={200: good("The sets", "sets"), **errors(401)})
    async def list_sets() -> SetList:
        """This server, and those that share a registry with it: what they serve, how busy they are, and their nodes."""
        readiness.require_started()
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
    """Those that are there, and those that are on their way."""
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
