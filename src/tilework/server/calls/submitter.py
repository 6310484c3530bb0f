"""Brings calls in: joins the one that an idempotency key names, or submits a new one, all of it or nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from uuid import uuid4

from tilework.core.actions import Reject
from tilework.core.time import ns_from_s, s_from_ns
from tilework.runtime.engine import Engine
from tilework.runtime.ticket import Ticket
from tilework.server.calls.call import Call, Finished
from tilework.server.calls.errors import CallError, UnknownModel, gone
from tilework.server.calls.finish import Finisher, stored_name
from tilework.server.calls.idempotency import Key
from tilework.server.calls.parsing.image_call import ImageCall
from tilework.server.calls.parsing.pictures import PictureFile, Pictures
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.records import CallRecord
from tilework.server.calls.refusals import NO_ROOM, cannot_keep, input_full, refused, too_many_open
from tilework.server.calls.registry import CallRegistry
from tilework.server.config import ServerConfig
from tilework.server.metrics.metrics import Metrics
from tilework.server.schema.answers import Unready
from tilework.server.sets import Sets
from tilework.server.tenants import Tenant
from tilework.server.text import shown
from tilework.store.journal import NotWritten
from tilework.store.results import ResultStore

logger = logging.getLogger("tilework.server.calls")

DISCONNECTED = "the client has disconnected"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSubmitter:
    """Submits calls, on the event loop. If `join` finds none, it has awaited nothing: `submit` may follow."""

    engine: Engine
    config: ServerConfig
    store: ResultStore
    metrics: Metrics
    call_registry: CallRegistry
    finisher: Finisher
    readiness: Readiness
    sets: Sets
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def join(self, key: Key) -> Call | None:
        """Return the call that a key led to before, if it is open, or done and its images are kept.

        Raises:
            KeyReused: the key belongs to another body.
            PicturesGone: the images have made room for newer ones.
        """
        now_ns = self.engine.now_ns()
        known = self.call_registry.find_key(key, now_ns)
        if isinstance(known, CallRecord):
            return await self._replayed(known, now_ns)
        if known is not None:
            await self._sync(known)
        return known

    async def submit(self, ask: ImageCall, tenant: Tenant, key: Key | None) -> Call:
        """Submit a new call, before anything is awaited; then wait until it outlives the machine, if calls do.

        Raises:
            CallError: it was refused.
        """
        self._check(ask, tenant)
        call = self._begin(ask, tenant, key)
        try:
            await self._sync(call)
        except BaseException:
            self.cancel(call, "its client was not told of it")
            raise
        finally:
            self.follow(call)  # Not before: the end depends on what the client that sent the call does next.
        return call

    async def _sync(self, call: Call) -> None:
        """Wait until a call outlives the machine, if calls do. Raises CallError if it may not."""
        try:
            await self.call_registry.journal.sync()
        except NotWritten as error:
            raise self._unwritable(call.uid, error) from error

    @asynccontextmanager
    async def keeping(self, pictures: Pictures, ask: ImageCall, tenant: Tenant) -> AsyncIterator[ImageCall]:
        """Yield the call with its pictures as files, for a later start, if there is a place for them.

        The files are removed at the end of the block, if the call has not begun by then.

        Raises:
            CallError: it was refused, before they are written; or they cannot be.
        """
        kept = self.call_registry.journal.pictures
        if kept is None or not pictures.contents:
            yield ask
            return
        self._check(ask, tenant)
        try:
            names = await kept.write(pictures.contents)
        except NotWritten as error:
            logger.error("a call of tenant %s was refused because it could not be kept: %s", tenant.name, error)
            self.metrics.count_unready(ask.terms.priority, len(ask.specs), Unready.DISK_UNWRITABLE)
            raise self.readiness.error(Unready.DISK_UNWRITABLE) from error
        given = zip(pictures.given, names, strict=True)
        files = tuple(PictureFile(name=one.name, is_mask=one.is_mask, file=file) for one, file in given)
        try:
            yield replace(ask, files=files)
        finally:
            kept.drop_unheld(names)

    def require_room_to_keep(self, priority: str, num_results: int) -> None:
        """Check that the results of a new call could be kept.

        Raises:
            NotReady: this number of results could not, beside those of open calls.
        """
        reason = self.store.refusal(self.call_registry.num_open_files + num_results)
        if reason is not None:
            self.metrics.count_unkept(priority)
            raise cannot_keep(reason)

    def detach(self, call: Call) -> None:
        """Let the call go on without any connection from now on."""
        call.is_detached = True
        _go_on(call)

    @contextmanager
    def owned(self, call: Call) -> Iterator[None]:
        """Count a connection that asked for the call as waiting for it while the block runs."""
        self.own(call)
        try:
            yield
        finally:
            self.disown(call)

    def own(self, call: Call) -> None:
        call.num_owners += 1
        _go_on(call)

    def disown(self, call: Call) -> None:
        """Cancel a call that no connection waits for; if it has a key, its client may come back for a while."""
        call.num_owners -= 1
        if call.num_owners or call.is_detached or call.end.done():
            return
        if call.key is None:
            self.cancel(call, DISCONNECTED)
        else:
            loop = asyncio.get_running_loop()
            call.abandoned = loop.call_later(self.config.reconnect_s, self.cancel, call, DISCONNECTED)

    def cancel(self, call: Call, reason: str) -> None:
        """End a call at the next step boundary; do nothing if all its images have ended."""
        if call.cancel_reason is None:
            call.cancel_reason = reason
        self.finisher.cancel(call, reason)

    def _check(self, ask: ImageCall, tenant: Tenant) -> None:
        self._check_ready(ask)
        self._check_model(ask)
        self._check_open(ask, tenant)
        self._check_memory(ask)

    def _check_ready(self, ask: ImageCall) -> None:
        if (unready := self.readiness.unready) is not None:
            self.metrics.count_unready(ask.terms.priority, len(ask.specs), unready)
            raise self.readiness.error(unready)

    def _check_model(self, ask: ImageCall) -> None:
        """Check that the model is still served: it was when the call was read, which may have waited since."""
        if ask.model not in self.engine.models:
            raise UnknownModel(f"The model {shown(ask.model)} is no longer served; ask for another.", field="model")

    def _check_open(self, ask: ImageCall, tenant: Tenant) -> None:
        num_open = self.call_registry.num_open(tenant.name)
        if tenant.max_open is None or num_open + len(ask.specs) <= tenant.max_open:
            return
        self.metrics.count_too_many_open(ask.terms.priority)
        etas_ns = [ticket.eta_ns for call in self.call_registry.open_calls(tenant.name) for ticket in call.tickets]
        wait_s = s_from_ns(min(etas_ns, default=0) - self.engine.now_ns())
        raise too_many_open(tenant, num_open, len(ask.specs), max(1, math.ceil(wait_s)))

    def _check_memory(self, ask: ImageCall) -> None:
        most_bytes = self.config.input_bytes
        if ask.num_input_bytes and self.call_registry.num_input_bytes + ask.num_input_bytes > most_bytes:
            self.metrics.count_input_full(ask.terms.priority)
            error = input_full(self.call_registry.num_input_bytes, ask.num_input_bytes, most_bytes)
            raise self._with_alternate(error, ask)

    def _begin(self, ask: ImageCall, tenant: Tenant, key: Key | None) -> Call:
        uid = uuid4().hex
        arrival_ns = self.engine.now_ns()
        if ask.user is not None:  # This text of the client is forgotten at the call's end.
            logger.info("call uid=%s status=begun tenant=%s user=%s", uid, tenant.name, shown(ask.user))
        call = Call(
            uid=uid,
            ask=ask,
            key=key,
            arrival_ns=arrival_ns,
            arrived_s=time.time(),
            tickets=self._submit(ask, uid, arrival_ns),
            identity=self.engine.status.identity(ask.model, ask.lora_names),
            end=asyncio.get_running_loop().create_future(),
        )
        try:
            self.call_registry.begin(call)
        except NotWritten as error:
            self._take_back(call)
            raise self._unwritable(uid, error) from error
        except Exception:
            self._take_back(call)
            raise
        return call

    def _unwritable(self, uid: str, error: NotWritten) -> CallError:
        logger.error("call %s was refused because it could not be kept: %s", uid, error)
        return self.readiness.error(Unready.DISK_UNWRITABLE)

    def _take_back(self, call: Call) -> None:
        """Cancel a call that the engine has accepted, but that could not be kept."""
        for ticket in call.tickets:
            ticket.taken_back = True
        self.finisher.cancel(call, "it could not be kept")

    def follow(self, call: Call) -> None:
        """Bring an open call to its end, whenever that comes."""
        task = asyncio.create_task(self.finisher.finish(call))
        self.tasks.add(task)  # The loop alone would not keep the task.
        task.add_done_callback(self.tasks.discard)

    def _submit(self, ask: ImageCall, call_uid: str, arrival_ns: int) -> tuple[Ticket, ...]:
        """Submit every image.

        Raises:
            CallError: the engine refused them.
        """
        answer = self.engine.submit(
            {f"{call_uid}-{index}": spec for index, spec in enumerate(ask.specs)},
            model=ask.model,
            deadline_ns=None if ask.slo_s is None else arrival_ns + ns_from_s(ask.slo_s),
            terms=ask.terms,
        )
        if isinstance(answer, Reject):
            raise self._with_alternate(refused(answer, ask, arrival_ns), ask)
        return answer

    def _with_alternate(self, error: CallError, ask: ImageCall) -> CallError:
        """Add to an error for lack of room the address of another set that could begin earlier, if there is one."""
        if error.code in NO_ROOM and error.retry_s is not None:
            url = self.sets.alternate(ask.model, error.retry_s)
            error.details |= {} if url is None else {"alternate": url}
        return error

    async def _replayed(self, record: CallRecord, now_ns: int) -> Call:
        """Return a call that is done already, as if it had just ended; `now_ns` is the time at which it was found.

        Raises:
            PicturesGone: its images have made room for newer ones.
        """
        status = record.status()
        files = []
        num_parts = record.ask.num_parts
        for number in range(len(status.images) * num_parts):
            result = await self.store.get(stored_name(record.tenant, record.uid, *divmod(number, num_parts)), now_ns)
            if result is None:
                raise gone(record.uid, "they made room for newer ones")
            with closing(result):
                files.append(await result.read())
        timelines = tuple(image.timeline for image in status.images if image.timeline is not None)
        end: asyncio.Future[Finished | CallError] = asyncio.get_running_loop().create_future()
        end.set_result(
            Finished(
                uid=record.uid, arrived_s=record.arrived_s, ask=record.ask, timelines=timelines, files=tuple(files)
            )
        )
        return Call(
            uid=record.uid,
            ask=record.ask,
            key=record.key,
            arrival_ns=0,
            arrived_s=record.arrived_s,
            tickets=(),
            end=end,
        )


def _go_on(call: Call) -> None:
    """Stop the timer that would cancel the call: a client has come back for it."""
    if call.abandoned is not None:
        call.abandoned.cancel()
        call.abandoned = None
