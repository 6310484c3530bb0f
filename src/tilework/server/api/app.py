"""The HTTP application: its services, routes and middleware, wired together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

import tilework
from tilework.core.time import ns_from_s
from tilework.distribution import install_command
from tilework.runtime.engine import Engine
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.observer import Observers
from tilework.server.additions import Additions
from tilework.server.api.admin_routes import add_admin_routes
from tilework.server.api.bodies import Bodies
from tilework.server.api.call_log import log_ended
from tilework.server.api.chat import ChatService
from tilework.server.api.errors import api_error, install_call_errors
from tilework.server.api.image_routes import add_chat_route, add_image_routes
from tilework.server.api.images import ImageService
from tilework.server.api.model_routes import add_model_routes
from tilework.server.api.openapi import HEADERS_OF_OURS, install_openapi
from tilework.server.api.probe_routes import (
    LiveService,
    add_live_route,
    add_plan_route,
    add_probe_routes,
    add_set_routes,
)
from tilework.server.api.request_routes import add_request_routes
from tilework.server.api.requests import RequestService
from tilework.server.api.video_routes import add_video_routes
from tilework.server.api.videos import VideoService
from tilework.server.batches.routes import add_batch_routes
from tilework.server.batches.runner import CLASS, BatchRunner
from tilework.server.batches.service import BatchService
from tilework.server.batches.shelf import BatchShelf
from tilework.server.call_webhooks import CallWebhooks
from tilework.server.calls.decode_plans import DecodePlans
from tilework.server.calls.encode import Threads
from tilework.server.calls.finish import Finisher
from tilework.server.calls.journal import CallJournal
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.records import CallRecord
from tilework.server.calls.registry import CallRegistry
from tilework.server.calls.submitter import CallSubmitter
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.http.direct import DirectRoute
from tilework.server.http.error_handlers import install_error_handlers
from tilework.server.http.errors import ApiError
from tilework.server.http.middleware import PROBES, CatchBugs, HeadAsGet, LimitHead, RequireKey, WhileStarting
from tilework.server.live.feed import Feed
from tilework.server.live.watchers import Watchers
from tilework.server.metrics.levels import Levels
from tilework.server.metrics.metrics import Metrics
from tilework.server.models_file import ModelEntry, read_models
from tilework.server.page.routes import PAGE_FILES, add_page
from tilework.server.planning.planner import CapacityPlanner
from tilework.server.planning.recent import RecentTraffic
from tilework.server.planning.service import PlanService
from tilework.server.safety_filter import SafetyFilter, load_safety_filter
from tilework.server.schema.answers import Unready
from tilework.server.sets import NodePlaces, Sets, new_sets
from tilework.server.tenants import CurrentTenants, load_tenants
from tilework.server.traces import Traces
from tilework.server.webhooks.sender import WebhookSender
from tilework.sets.window import UseWindow
from tilework.store.durable import DurableDirectory
from tilework.store.memory import MemoryStore
from tilework.store.results import ResultStore
from tilework.store.shared import SharedStore
from tilework.store.spooled import SpooledStore

S3 = "s3"
ASSETS = "/docs-assets"  # Scripts and styles of /docs, served from here, since the server may have no network.


def create_app(
    start: EngineStart,
    config: ServerConfig,
    *,
    store: ResultStore | None = None,
    rng: Random | None = None,
    readiness: Readiness | None = None,
    call_registry: CallRegistry | None = None,
    nodes: NodePlaces | None = None,
    data: Path | None = None,
) -> FastAPI:
    """Build the application. It answers probes, and refuses the rest until there is an engine: see `main.serve`.

    The caller starts the engine with `app.state.observer`, calls `app.state.add_engine` with it, which adds the other
    routes, and sets that of `readiness` when calls may come. The caller closes all of `app.state.closed_last`, and
    before the server can stop, `watchers`.

    `store` keeps results that are fetched later (default: in memory). `rng` chooses seeds for clients that send none.
    `readiness` says whether calls are taken. `call_registry` lets the caller see open calls. `nodes` are the engine's.
    `data` is the folder for files of batches, if they are kept. `app.state` holds `tenants`, which may be swapped,
    `sets`, which the caller has to run, and with an engine `submitter`, for calls that do not come by HTTP, and
    `images`.

    Raises:
        ConfigError: the file of tenants, that of models, the registry of sets or the safety filter cannot be used.
    """
    tenants = CurrentTenants(load_tenants(config))
    safety_filter = load_safety_filter(config.safety_filter)
    entries = dict(read_models(config.models))
    store = new_store(config, start.now_ns) if store is None else store
    readiness = readiness or Readiness(start, backlog=store.backlog)
    use = UseWindow(ns_from_s(config.set_window_s))
    sets = new_sets(lambda: readiness.engine, config, use, nodes)
    metrics = Metrics(use)
    feed = Feed(start.now_ns)
    recent = RecentTraffic(start.now_ns)
    threads = Threads(config.encode_threads)
    call_registry = new_call_registry(config) if call_registry is None else call_registry
    webhooks = _webhooks(config, call_registry, metrics)
    traces = Traces(config.traces) if config.traces else None
    app = _empty_app(threads, traces)

    def add_engine(engine: Engine) -> None:
        metrics.register(Levels(engine, store, lambda: readiness.unready, readiness.disk))
        submitter = _submitter(
            engine=engine,
            config=config,
            store=store,
            metrics=metrics,
            threads=threads,
            call_registry=call_registry,
            readiness=readiness,
            sets=sets,
            observers=(webhooks.on_record, log_ended, *(() if traces is None else (traces.on_record,))),
            safety_filter=safety_filter,
        )
        images = _images(engine, entries, config, submitter, metrics, threads, rng or SystemRandom(), safety_filter)
        planner = CapacityPlanner(engine, recent)
        app.state.submitter = submitter
        app.state.images = images
        app.state.watchers = Watchers(engine, feed)
        app.state.batches = _batches(app, config, tenants, images, readiness, data)
        app.state.closed_last[:0] = [planner, app.state.batches]
        _add_routes(app, images, readiness)
        add_batch_routes(app, app.state.batches)
        add_live_route(app, LiveService(app.state.watchers, config, tenants))
        add_plan_route(app, PlanService(planner, readiness))

    app.state.add_engine = add_engine
    app.state.observer = Observers(metrics, feed, recent, readiness)
    app.state.readiness = readiness
    app.state.metrics = metrics
    app.state.entries = entries
    app.state.sets = sets
    app.state.webhooks = webhooks
    app.state.watchers = None
    app.state.tenants = tenants
    app.state.closed_last = [webhooks.sender, store]
    add_probe_routes(app, readiness, metrics)
    add_page(app)
    install_error_handlers(app)
    install_call_errors(app)
    install_openapi(app, has_keys=lambda: tenants.value.has_keys)
    app.middleware_stack = _stack(app, config, tenants, readiness)
    return app


def _empty_app(threads: Threads, traces: Traces | None) -> FastAPI:
    app = FastAPIOffline(
        title="Tilework",
        version=tilework.__version__,
        redoc_url=None,
        static_url=ASSETS,
        redirect_slashes=False,
        lifespan=_closing(threads, traces),
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `traces` exports calls.
    )
    app.router.route_class = DirectRoute
    return app


def _submitter(
    *,
    engine: Engine,
    config: ServerConfig,
    store: ResultStore,
    metrics: Metrics,
    threads: Threads,
    call_registry: CallRegistry,
    readiness: Readiness,
    sets: Sets,
    observers: tuple[Callable[[CallRecord], None], ...],
    safety_filter: SafetyFilter | None,
) -> CallSubmitter:
    return CallSubmitter(
        engine=engine,
        config=config,
        store=store,
        metrics=metrics,
        call_registry=call_registry,
        finisher=Finisher(
            engine=engine,
            store=store,
            threads=threads,
            call_registry=call_registry,
            has_metadata=config.metadata,
            observers=observers,
            safety_filter=safety_filter,
        ),
        readiness=readiness,
        sets=sets,
    )


def _images(
    engine: Engine,
    entries: dict[str, ModelEntry],
    config: ServerConfig,
    submitter: CallSubmitter,
    metrics: Metrics,
    threads: Threads,
    rng: Random,
    safety_filter: SafetyFilter | None,
) -> ImageService:
    return ImageService(
        engine=engine,
        config=config,
        entries=entries,
        additions=Additions(submitter.call_registry.journal),
        submitter=submitter,
        metrics=metrics,
        threads=threads,
        rng=rng,
        safety_filter=safety_filter,
        bodies=Bodies(config=config, threads=threads),
        plans=DecodePlans(num_devices=lambda model: len(engine.status.devices_serving(model))),
    )


def _batches(
    app: FastAPI,
    config: ServerConfig,
    tenants: CurrentTenants,
    images: ImageService,
    readiness: Readiness,
    data: Path | None,
) -> BatchService:
    shelf = None if data is None else BatchShelf(data / "batches", config)
    runner = None if shelf is None else BatchRunner(app, shelf, tenants, config.max_running_batches)

    def require_ready() -> None:
        readiness.require()
        images.submitter.require_room_to_keep(CLASS, num_results=1)

    return BatchService(config, shelf, runner, images.bodies.room, require_ready, images.check_rate)


def _webhooks(config: ServerConfig, call_registry: CallRegistry, metrics: Metrics) -> CallWebhooks:
    sender = WebhookSender(
        config.webhook_secret or "",
        on_told=call_registry.mark_told,
        is_known=call_registry.is_known,
        on_attempt=metrics.count_webhook,
    )
    return CallWebhooks(call_registry, sender)


def _add_routes(app: FastAPI, images: ImageService, readiness: Readiness) -> None:
    requests = RequestService(
        engine=images.engine,
        config=images.config,
        store=images.submitter.store,
        call_registry=images.submitter.call_registry,
        submitter=images.submitter,
        threads=images.threads,
    )
    add_image_routes(app, images, requests)
    add_video_routes(app, VideoService(images=images, requests=requests))
    add_chat_route(app, ChatService(images=images))
    add_request_routes(app, requests)
    card = add_model_routes(app, images, readiness, created=int(time.time()))
    add_set_routes(app, images.submitter.sets)
    add_admin_routes(app, images, readiness, card)


def _stack(app: FastAPI, config: ServerConfig, tenants: CurrentTenants, readiness: Readiness) -> ASGIApp:
    """Wrap the routes in middleware, from the inside out.

    The stack that FastAPI would build has further layers, for bugs, bodies and telemetry: this server does that itself.
    """
    stack: ASGIApp = AsyncExitStackMiddleware(app.router)  # For routes that are not direct.
    stack = HeadAsGet(ExceptionMiddleware(stack, app.exception_handlers))
    app.state.open_paths = PROBES | PAGE_FILES.keys()

    def refusal() -> ApiError | None:
        return api_error(readiness.error(Unready.STARTING)) if readiness.engine is None else None

    stack = WhileStarting(stack, refusal, app.state.open_paths)
    most_at_once = max(1, config.max_connections // 2)
    stack = RequireKey(stack, tenants=tenants, open_paths=app.state.open_paths, most_at_once=most_at_once)
    stack = CatchBugs(stack)
    stack = LimitHead(stack, max_bytes=config.max_head_bytes)
    if not config.origins:
        return stack
    return CORSMiddleware(
        stack,
        allow_origins=config.origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=HEADERS_OF_OURS,
    )


def new_call_registry(config: ServerConfig, journal: CallJournal | None = None) -> CallRegistry:
    ttl_ns = ns_from_s(config.result_ttl_s)
    return CallRegistry(max_records=config.max_records, max_bytes=config.record_bytes, ttl_ns=ttl_ns, journal=journal)


def new_store(config: ServerConfig, now_ns: Callable[[], int], durable: DurableDirectory | None = None) -> ResultStore:
    """Open the store that the settings name, on the clock `now_ns`.

    Raises:
        OSError: a durable store cannot be opened, or there is no place for results that wait for that of `results`.
        ConfigError: the store of `results` cannot be used.
    """
    ttl_ns = ns_from_s(config.result_ttl_s)
    if config.results is not None:
        shared = _shared_store(config.results, config.result_bytes, ttl_ns)
        spool_bytes = config.spool_bytes
        return SpooledStore(shared, durable, spool_bytes=spool_bytes, ttl_ns=ttl_ns, now_ns=now_ns)
    if durable is None:
        return MemoryStore(max_bytes=config.result_bytes, ttl_ns=ttl_ns)
    return durable.results(max_bytes=config.result_bytes, ttl_ns=ttl_ns)


def _shared_store(urls: str, max_bytes: int, ttl_ns: int) -> SharedStore:
    is_s3 = urls.startswith(f"{S3}:")
    try:
        if is_s3:
            from tilework.store.s3_results import S3Store

            return S3Store(urls, max_bytes=max_bytes, ttl_ns=ttl_ns)
        from tilework.store.redis_results import RedisStore

        return RedisStore(urls.split(","), max_bytes=max_bytes, ttl_ns=ttl_ns)
    except ModuleNotFoundError as error:
        extra = S3 if is_s3 else "redis"
        raise ConfigError(f"results is {urls!r}, which needs a package: {install_command(extra)}") from error
    except ValueError as error:
        wanted = "redis://HOST:PORT, several by commas, or s3://BUCKET?endpoint=URL"
        raise ConfigError(f"results is {urls!r}: {error}; give {wanted}") from error


def _closing(threads: Threads, traces: Traces | None) -> Any:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        threads.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)

    return lifespan
