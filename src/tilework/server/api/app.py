"""The HTTP API: routes and their wiring. What happens in them is in `images` and `requests`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random, SystemRandom
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

import tilework
from tilework.core.time import ns_from_s
from tilework.server.api.chat import ChatService
from tilework.server.api.images import ImageService
from tilework.server.api.requests import RequestService
from tilework.server.calls.encode import Threads
from tilework.server.calls.finish import Finisher
from tilework.server.calls.journal import CallJournal
from tilework.server.calls.parsing import check_model
from tilework.server.calls.registry import CallRegistry
from tilework.server.calls.submitter import CallSubmitter
from tilework.server.config import ServerConfig
from tilework.server.engine_protocol import Engine
from tilework.server.http.errors import install_error_handlers
from tilework.server.http.middleware import CatchBugs, HeadAsGet, InPieces, LimitHead, RequireKey
from tilework.server.metrics.metrics import Metrics
from tilework.server.ready import Readiness
from tilework.server.schema.answers import (
    Alive,
    ChatCompletion,
    Decisions,
    ImagesResponse,
    ModelCard,
    ModelList,
    ModelPath,
    ReadyModel,
    RequestList,
    RequestStatus,
)
from tilework.server.schema.examples import PICTURES, PROGRESS, UID
from tilework.server.schema.openapi import (
    CHAT_BODY,
    IDEMPOTENCY_KEY,
    IMAGE_BODY,
    PREFER,
    errors,
    files,
    good,
    header_docs,
    install_openapi,
    stream,
    text,
)
from tilework.server.tenants import load_tenants
from tilework.store.durable import DurableDirectory
from tilework.store.memory import MemoryStore
from tilework.store.results import ResultStore

MAX_LISTED = 100
Uid = Annotated[str, Path(description="a call, or one of its images as `{call}-{index}`", examples=[UID])]
ImageUid = Annotated[str, Path(description="an image", examples=[f"{UID}-0"])]
ModelId = Annotated[str, Path(description="a name or path of the model", examples=["tiny-shapes"])]
Limit = Annotated[
    int, Query(ge=1, le=MAX_LISTED, description=f"an integer from 1 to {MAX_LISTED}, how many at most (default 20)")
]
After = Annotated[str | None, Query(description="the `last_id` of a page: list those that came before", examples=[UID])]
Index = Annotated[
    int | None, Query(ge=0, le=999, description="an integer from 0 to 999, which image of a call (default 0)")
]


def create_app(
    engine: Engine,
    config: ServerConfig,
    *,
    store: ResultStore | None = None,
    rng: Random | None = None,
    readiness: Readiness | None = None,
    call_registry: CallRegistry | None = None,
) -> FastAPI:
    """Build the application. It neither starts nor stops the engine: see `main.serve`.

    `store` keeps results that are fetched later (default: in memory); `rng` chooses seeds for clients that send none.
    `readiness` says when the engine has started (default: it has); `call_registry` lets the caller see which calls are
    open. `app.state.submitter` is the `CallSubmitter`, for calls that do not come by HTTP.

    Raises:
        ConfigError: the file of tenants cannot be used.
    """
    tenants = load_tenants(config)
    store = new_store(config) if store is None else store
    readiness = readiness or Readiness(engine)
    call_registry = new_call_registry(config) if call_registry is None else call_registry
    metrics = Metrics(engine, store)
    engine.observe(metrics)
    threads = Threads(config.encode_threads)
    finisher = Finisher(engine=engine, store=store, threads=threads, call_registry=call_registry)
    submitter = CallSubmitter(
        engine=engine,
        config=config,
        store=store,
        metrics=metrics,
        call_registry=call_registry,
        finisher=finisher,
        readiness=readiness,
    )
    images = ImageService(
        engine=engine,
        config=config,
        tenants=tenants,
        submitter=submitter,
        metrics=metrics,
        threads=threads,
        rng=rng or SystemRandom(),
    )
    requests = RequestService(
        engine=engine, config=config, store=store, call_registry=call_registry, submitter=submitter, threads=threads
    )
    app = FastAPI(title="Tilework", version=tilework.__version__, redirect_slashes=False, lifespan=_closing(threads))
    app.state.submitter = submitter
    _add_image_routes(app, images, requests)
    _add_chat_route(app, ChatService(images=images))
    _add_request_routes(app, requests)
    _add_model_routes(app, readiness, created=int(time.time()))
    _add_probe_routes(app, readiness, metrics)
    install_error_handlers(app)
    install_openapi(app, has_keys=tenants.has_keys)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequireKey, tenants=tenants)
    app.add_middleware(CatchBugs)
    app.add_middleware(LimitHead, max_bytes=config.max_head_bytes)
    app.add_middleware(InPieces)  # The last one added is the outermost.
    return app


def new_call_registry(config: ServerConfig, journal: CallJournal | None = None) -> CallRegistry:
    ttl_ns = ns_from_s(config.result_ttl_s)
    return CallRegistry(max_records=config.max_records, max_bytes=config.record_bytes, ttl_ns=ttl_ns, journal=journal)


def new_store(config: ServerConfig, durable: DurableDirectory | None = None) -> ResultStore:
    """Raises OSError if a durable one cannot be opened."""
    ttl_ns = ns_from_s(config.result_ttl_s)
    if durable is None:
        return MemoryStore(max_bytes=config.result_bytes, ttl_ns=ttl_ns)
    return durable.results(max_bytes=config.result_bytes, ttl_ns=ttl_ns)


def _closing(threads: Threads) -> Any:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        threads.close()

    return lifespan


def _add_image_routes(app: FastAPI, images: ImageService, requests: RequestService) -> None:
    done = good("The pictures", "images", "x-request-id", "Idempotent-Replayed")
    done["content"] |= stream("", PICTURES, fields={"stream": True, "partial_images": 1})["content"]
    accepted = {
        **good("Accepted; the pictures come later", "status", asked={"Prefer": "respond-async"}),
        "model": RequestStatus,
        "headers": header_docs("x-request-id", "Location", "Preference-Applied", "Idempotent-Replayed"),
    }

    @app.post(
        "/v1/images/generations",
        tags=["images"],
        response_model=ImagesResponse,
        responses={
            200: done,
            202: accepted,
            **errors(400, 401, 404, 408, 409, 410, 413, 415, 422, 429),
        },
        openapi_extra={**IMAGE_BODY, "parameters": [IDEMPOTENCY_KEY, PREFER]},
    )
    async def generate_images(http: Request) -> Response:
        """Draw images, all or none of them. With n above 1, image i is drawn with seed + i."""
        return await images.generate(http)

    @app.get(
        "/v1/images/{uid}/content",
        tags=["images"],
        response_class=Response,
        responses={200: files("The file"), **errors(401, 404, 409, 410)},
    )
    async def image_content(uid: ImageUid, http: Request) -> Response:
        """The file of an image; `uid` is the image's own."""
        return await requests.content(uid, None, http)


def _add_chat_route(app: FastAPI, chat: ChatService) -> None:
    @app.post(
        "/v1/chat/completions",
        tags=["images"],
        response_model=ChatCompletion,
        responses={
            200: good("The pictures", "chat", "x-request-id", "Idempotent-Replayed"),
            **errors(400, 401, 404, 408, 409, 410, 413, 415, 422, 429),
        },
        openapi_extra={**CHAT_BODY, "parameters": [IDEMPOTENCY_KEY]},
    )
    async def complete_chat(http: Request) -> Response:
        """Draw images as the answer in a chat, for clients of vLLM-Omni."""
        return await chat.complete(http)


def _add_request_routes(app: FastAPI, requests: RequestService) -> None:
    @app.get(
        "/v1/requests",
        tags=["requests"],
        response_model=RequestList,
        responses={200: good("Calls, newest first", "list"), **errors(400, 401)},
    )
    async def list_requests(http: Request, limit: Limit = 20, after: After = None) -> RequestList:
        """The tenant's own calls, those that are open and those that ended lately, newest first."""
        return requests.latest(limit, after, http)

    @app.get(
        "/v1/requests/{uid}",
        tags=["requests"],
        response_model=RequestStatus,
        responses={200: good("How it stands", "status"), **errors(401, 404)},
    )
    async def request_status(uid: Uid, http: Request) -> RequestStatus:
        """How a call stands, or one image of it."""
        return requests.status(uid, http)

    @app.delete(
        "/v1/requests/{uid}",
        tags=["requests"],
        response_model=RequestStatus,
        responses={200: good("Its final state", "cancelled"), **errors(401, 404)},
    )
    async def delete_request(uid: Uid, http: Request) -> RequestStatus:
        """Cancel a call, all of its images; devices are free at the next step. If it has ended, delete its pictures."""
        return await requests.delete(uid, http)

    @app.get(
        "/v1/requests/{uid}/events",
        tags=["requests"],
        response_class=Response,
        responses={200: stream("Events, from the present state to the end", PROGRESS), **errors(401, 404)},
    )
    async def request_events(uid: Uid, http: Request) -> Response:
        """How it goes, as server-sent events; reading can begin, and begin again, at any time."""
        return requests.events(uid, http)

    @app.get(
        "/v1/requests/{uid}/content",
        tags=["requests"],
        response_class=Response,
        responses={200: files("The file"), **errors(400, 401, 404, 409, 410)},
    )
    async def request_content(uid: Uid, http: Request, index: Index = None) -> Response:
        """The file of an image: that of `uid`, or number `index` of a call (default 0)."""
        return await requests.content(uid, index, http)

    @app.get(
        "/v1/requests/{uid}/decisions",
        tags=["requests"],
        response_model=Decisions,
        responses={200: good("Decisions in order", "decisions"), **errors(401, 404)},
    )
    async def request_decisions(uid: Uid, http: Request) -> Decisions:
        """What the scheduler decided about a call or an image of it, and why."""
        return requests.decisions(uid, http)


def _add_model_routes(app: FastAPI, readiness: Readiness, created: int) -> None:
    @app.get(
        "/v1/models",
        tags=["models"],
        response_model=ModelList,
        responses={
            200: good("The served model", "models"),
            **errors(401),
        },
    )
    async def list_models() -> ModelList:
        """What is served here: one model, with its limits and defaults."""
        readiness.require()
        return ModelList(data=[_model_card(readiness.engine, created)])

    @app.get(
        "/v1/models/{model_id:path}",
        tags=["models"],
        response_model=ModelCard,
        responses={200: good("The model", "model"), **errors(401, 404)},
    )
    async def retrieve_model(model_id: ModelId) -> ModelCard:
        """The served model, by its name or path."""
        readiness.require()
        check_model(model_id, readiness.engine.info)
        return _model_card(readiness.engine, created)

    @app.get(
        "/v1/model_info",
        tags=["models"],
        responses={200: good("Where it comes from", "model path"), **errors(401)},
    )
    async def model_info() -> ModelPath:
        """Where the served model comes from, for clients of SGLang; calls may name the model so, too."""
        readiness.require()
        return ModelPath(model_path=readiness.engine.info.path or readiness.engine.info.name)


def _model_card(engine: Engine, created: int) -> ModelCard:
    info = engine.info
    limits = {
        "family": info.family,
        "parameters": info.parameters,
        "side_multiple": info.side_multiple,
        "max_side": info.max_side,
        "default_size": f"{info.default_width}x{info.default_height}",
        "default_steps": info.default_steps,
        "default_guidance_scale": info.default_guidance_scale,
        "policy": engine.policy,
    }
    return ModelCard(id=info.name, created=created, tilework=limits)


def _add_probe_routes(app: FastAPI, readiness: Readiness, metrics: Metrics) -> None:
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
