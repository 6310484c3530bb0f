"""Calls for images: answered at once when they are done, as a stream of events, or later."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response

from tilework.core.model import ModelInfo
from tilework.core.request import OnMiss
from tilework.core.time import s_from_ns
from tilework.core.wire.spec import Spec
from tilework.runtime.engine import Engine
from tilework.server.additions import Additions
from tilework.server.api.bodies import IMAGES, Bodies, Route
from tilework.server.api.call_log import log_refused
from tilework.server.api.errors import STATUSES
from tilework.server.calls.call import Call, Finished
from tilework.server.calls.decode_plans import DecodePlans
from tilework.server.calls.encode import Threads
from tilework.server.calls.errors import CallError, ContentRefused
from tilework.server.calls.events import CallEvents, StreamEvent, View
from tilework.server.calls.parsing.fields import renamed, with_texts
from tilework.server.calls.parsing.image_call import ImageCall, image_call
from tilework.server.calls.parsing.pictures import taken_pictures
from tilework.server.calls.parsing.sizes import size_text
from tilework.server.calls.parsing.specs import Rules
from tilework.server.calls.provenance import texts_of
from tilework.server.calls.refusals import too_many_a_minute
from tilework.server.calls.served_models import ServedModels
from tilework.server.calls.status import call_status
from tilework.server.calls.submitter import CallSubmitter
from tilework.server.config import ServerConfig
from tilework.server.default_slo import DefaultSlos
from tilework.server.http.connection import unless_gone
from tilework.server.http.errors import ApiError
from tilework.server.http.middleware import key_of, tenant_of, tenants_of
from tilework.server.http.prefer import preference
from tilework.server.http.sse import EventStream, event
from tilework.server.metrics.metrics import Metrics
from tilework.server.models_file import ModelEntry
from tilework.server.request_rates import PromiseTurns, RequestRates
from tilework.server.safety_filter import SafetyFilter
from tilework.server.schema.answers import ImageData, ImagesResponse
from tilework.server.schema.image_request import OutputFormat
from tilework.server.tenants import Tenant
from tilework.server.traces import TRACEPARENT

Wire = Callable[[AsyncGenerator[StreamEvent, None]], AsyncGenerator[bytes, None]]
REPLAYED = {"Idempotent-Replayed": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEntry:
    """A call as one connection sees it; `is_replay` if an earlier request with the same key started it."""

    call: Call
    is_replay: bool

    def headers(self) -> dict[str, str]:
        deadline = self.call.ask.deadline
        judged: dict[str, str] = {}
        if deadline is not None:
            judged = {"x-tilework-slo-s": f"{deadline.slo_s:.15g}", "x-tilework-slo-source": deadline.source}
        return {"x-request-id": self.call.uid, **judged, **(REPLAYED if self.is_replay else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageService:
    """Serves `POST /v1/images/generations` and `/v1/images/edits`. `rng` chooses seeds for clients that send none."""

    engine: Engine
    config: ServerConfig
    entries: dict[str, ModelEntry]
    additions: Additions
    submitter: CallSubmitter
    metrics: Metrics
    threads: Threads
    rng: Random
    bodies: Bodies
    plans: DecodePlans
    safety_filter: SafetyFilter | None = None
    rates: RequestRates = field(default_factory=RequestRates)
    promise_turns: PromiseTurns = field(default_factory=PromiseTurns)

    @property
    def models(self) -> ServedModels:
        """The models that are served; the engine must have started."""
        engine = self.engine
        config = self.config
        return ServedModels(engine.models, self.entries, config.served_names, config.strict, engine.not_served)

    def check_free(self, name: str, aliases: Sequence[str]) -> None:
        """Check names as `ServedModels.check_free` does, against the models that are served at that moment."""
        self.models.check_free(name, aliases)

    async def generate(self, http: Request, route: Route = IMAGES) -> Response:
        wish = preference(http.headers.getlist("prefer"))
        entry = await self.enter(http, route, is_later=wish.is_async)
        call = entry.call
        headers = entry.headers()
        if call.ask.is_stream:
            return self.stream(call, headers, on_wire, has_progress=call.ask.has_progress)
        if wish.is_async:
            self.submitter.detach(call)
            headers["Preference-Applied"] = wish.applied()
            if not await self._wait(call, http, wish.wait_s):
                return self._later(entry, http, headers)
        return await self._answer(await self.result(call, http), http, headers)

    async def enter(self, http: Request, route: Route, *, is_later: bool = False) -> CallEntry:
        """Join the call that a client's idempotency key led to before, or submit what the client asks for.

        `is_later`: unless the call is a stream, its client fetches the images later. A repeat has the body of the first
        call, which was valid then: it is not checked against the clock again.

        Raises:
            ApiError: head or body cannot be read.
            CallError: the call is wrong, it was refused, or the models are not loaded yet; as `CallSubmitter.join`.
        """
        tenant = tenant_of(http.scope)
        try:
            return await self._enter(http, route, tenant, is_later=is_later)
        except CallError as error:
            log_refused(tenant.name, STATUSES[type(error)], error.code, error.details.get("uid"))
            raise
        except ApiError as error:
            log_refused(tenant.name, error.status, error.code, None)
            raise

    async def _enter(self, http: Request, route: Route, tenant: Tenant, *, is_later: bool) -> CallEntry:
        """Do as `enter`, without the log. Raises as `enter`."""
        models = self.models
        self.check_rate(tenant, key_of(http.scope))
        with self.bodies.room.place() as place:
            with self._counting_mistakes():
                body = await self.bodies.read(http, route, models, place)
                key = await self.bodies.key(http, tenant, body, place)
            if key is not None and (known := await self.submitter.join(key)) is not None:
                return CallEntry(call=known, is_replay=True)
            with self._counting_mistakes():
                max_chars = self.config.max_prompt_chars
                asked = route.fields(body, max_chars)
                info = route.model(asked.fields, models)
                fields, given = taken_pictures(renamed(asked.fields, info), info, is_edit=route.is_edit)
                fields = with_texts(fields, max_chars)
                pictures = await self.bodies.decoded(given)
        with self._counting_mistakes():
            more: Any = {"pictures": pictures, "stream_of": route.stream_of, "video": asked.video}
            ask = image_call(fields, self._rules(http, models, info, asked.fields.get("model")), self.rng, **more)
            ask = replace(ask, traceparent=_traceparent(http))
            self.metrics.count_warnings(len(ask.warnings))
            await self._check_texts(ask.specs[0])
            has_waited = await self.plans.check(info, ask.specs[0]) or bool(given) or self.safety_filter is not None
        if ask.as_url or (is_later and not ask.is_stream):
            self.submitter.require_room_to_keep(ask.terms.priority, ask.num_files)
        async with self.submitter.keeping(pictures, ask, tenant) as ask, self._turn(ask, tenant) as has_waited_more:
            has_waited = has_waited or has_waited_more
            if has_waited and key is not None and (known := await self.submitter.join(key)) is not None:
                return CallEntry(call=known, is_replay=True)  # The first call came meanwhile.
            return CallEntry(call=await self.submitter.submit(ask, tenant, key), is_replay=False)

    @asynccontextmanager
    async def _turn(self, ask: ImageCall, tenant: Tenant) -> AsyncIterator[bool]:
        """Let a call that asks for a promise wait for its turn to be submitted; yield whether it asks for one."""
        if ask.terms.on_miss is not OnMiss.REJECT:
            yield False
            return
        async with self.promise_turns.of(tenant.name, ask.terms.promise_share):
            yield True

    async def _check_texts(self, spec: Spec) -> None:
        """Raise ContentRefused if the safety filter objects to a text."""
        if self.safety_filter is None:
            return
        reason = await self.threads.run(self.safety_filter.refuse_texts, texts_of(spec))
        if reason is not None:
            raise ContentRefused(f"This server does not draw this: {reason}.", resend=False)

    def check_rate(self, tenant: Tenant, key: bytes) -> None:
        """Raise CallError if the key has made its calls of this minute."""
        if wait_ns := self.rates.take(tenant, key, self.engine.now_ns()):
            self.metrics.count_too_many_a_minute()
            raise too_many_a_minute(tenant, wait_ns)

    def _rules(self, http: Request, models: ServedModels, info: ModelInfo, name: object) -> Rules:
        """Return the rules for a body that asks, as of now, for this model by this `name`."""
        tenant = tenant_of(http.scope)
        tenants = tenants_of(http.scope)
        return Rules(
            info=info,
            defaults=DefaultSlos(
                tenant=tenant.default_slo,
                classes=tenants.default_slos,
                model=models.default_slo(info.name),
                server=self.config.usual_slo,
            ),
            alone_s=partial(self._alone_s, info.name),
            config=self.config,
            tenants=tenants,
            tenant=tenant,
            now=datetime.now(UTC),
            stands_in=isinstance(name, str) and models.stands_in(name),
        )

    def _alone_s(self, model: str, specs: Sequence[Spec]) -> float | None:
        alone_ns = self.engine.status.alone_ns(model, specs)
        return None if alone_ns is None else s_from_ns(alone_ns)

    @contextmanager
    def _counting_mistakes(self) -> Iterator[None]:
        try:
            yield
        except (ApiError, CallError):
            self.metrics.count_invalid()
            raise

    async def result(self, call: Call, http: Request) -> Finished:
        """Wait for a call on behalf of its client.

        Raises:
            CallError: it failed or was cancelled.
            ClientDisconnect: the client went away; its call is cancelled unless it may come back for it.
        """
        with self.submitter.owned(call):
            await unless_gone(http.receive, call.end)
        end = call.end.result()
        if isinstance(end, CallError):
            raise end
        return end

    def stream(self, call: Call, headers: Mapping[str, str], wire: Wire, *, has_progress: bool) -> Response:
        """Stream the events of a call, as `wire` puts them into bytes, until it has ended or its client has gone."""
        ask = call.ask
        events = CallEvents(
            engine=self.engine,
            threads=self.threads,
            uid=call.uid,
            call=call,
            view=View(has_progress=has_progress, has_files=True, num_partial=ask.num_partial),
            images=range(len(ask.specs)),
        )
        self.submitter.own(call)
        return EventStream(
            wire(events.events()),
            keep_alive_s=self.config.keep_alive_s,
            headers=headers,
            on_close=lambda: self.submitter.disown(call),
        )

    async def _wait(self, call: Call, http: Request, wait_s: float) -> bool:
        """Wait at most `wait_s` for the end of a call; return whether it has ended."""
        return call.end.done() or (wait_s > 0 and await unless_gone(http.receive, call.end, wait_s))

    def _later(self, entry: CallEntry, http: Request, headers: dict[str, str]) -> Response:
        """Make the answer 202. A new call shows the prediction of its admission; a replayed call is predicted again."""
        call = entry.call
        status = call_status(call, self.engine if entry.is_replay else None)
        location = f"{base_url(self.config, http)}/v1/requests/{call.uid}"
        body = status.model_dump_json()
        return Response(body, 202, {**headers, "Location": location}, media_type="application/json")

    async def _answer(self, finished: Finished, http: Request, headers: dict[str, str]) -> Response:
        self.submitter.call_registry.mark_all_fetched(finished.uid)
        body = await self.threads.run(_answer_json, finished, base_url(self.config, http))
        return Response(body, headers=headers, media_type="application/json")


def _traceparent(http: Request) -> str | None:
    """Return the trace that a call is part of, if its client names one in the form of W3C."""
    given = http.headers.get("traceparent", "")
    return given if TRACEPARENT.fullmatch(given) else None


async def on_wire(events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
    """Yield the events of a call as server-sent events; closing this closes `events`."""
    async with aclosing(events):
        async for one in events:
            yield event(one.name, one.data)


def base_url(config: ServerConfig, http: Request) -> str:
    return (config.public_url or str(http.base_url)).rstrip("/")


def _content_url(base: str, uid: str, frame: int | None) -> str:
    url = f"{base}/v1/images/{uid}/content"
    return url if frame is None else f"{url}?frame={frame}"


def _answer_json(finished: Finished, base: str) -> bytes:
    """Encode an answer in ASCII only, so that a client's odd characters come back escaped."""
    ask = finished.ask
    data = [
        ImageData(
            b64_json=None if ask.as_url else base64.b64encode(file).decode("ascii"),
            url=_content_url(base, timeline.uid, frame) if ask.as_url else None,
            frame=frame,
            tilework=timeline,
        )
        for index, timeline in enumerate(finished.timelines)
        for frame, file in finished.parts(index)
    ]
    answer = ImagesResponse(
        created=int(finished.arrived_s),
        data=data,
        output_format=cast(OutputFormat, ask.output_format),  # Videos have another form of answer.
        size=size_text(ask.specs[0].shape),
    )
    return json.dumps(answer.model_dump(mode="python")).encode("ascii")
