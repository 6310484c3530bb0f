"""Runs engine and HTTP server together, from binding the port to a graceful stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI

from tilework.runtime.engine import Engine
from tilework.runtime.engine_start import EngineStart
from tilework.server.api.app import create_app, new_call_registry, new_store
from tilework.server.api.images import ImageService
from tilework.server.calls.journal import DurableJournal
from tilework.server.calls.readiness import Readiness
from tilework.server.calls.registry import CallRegistry
from tilework.server.calls.restore import restore
from tilework.server.calls.submitter import CallSubmitter
from tilework.server.config import ServerConfig
from tilework.server.drain import drained, is_waited_for, waits_for
from tilework.server.frontends.messages import StandingAnswer
from tilework.server.frontends.supervisor import FrontEnds
from tilework.server.garbage import give_back_large_blocks, rare_collections, sweep
from tilework.server.http.connections.descriptors import raise_limit
from tilework.server.http.probe_port import probe_port
from tilework.server.http.server import HttpServer, bind
from tilework.server.reload import Reloading, Reread, Terminal
from tilework.server.sets import NodePlaces
from tilework.server.standing_answer import standing_answer
from tilework.sets.chores import Chore, kept_alive
from tilework.store.durable import DurableDirectory
from tilework.store.results import ResultStore

T = TypeVar("T")
_log = logging.getLogger("tilework.server")
CLOSE_S = 5  # Time for the last answers, after the drain or after a second signal.
FAILED_S = 1  # Time to record which requests have failed with the engine.


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals of a server. `stop` asks it to finish what is running, `hurry` to stop waiting for that, `reload` to
    read its settings again.
    """

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    reload: asyncio.Event = field(default_factory=asyncio.Event)
    terminal: Terminal = field(default_factory=Terminal)

    def end(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def hang_up(self) -> None:
        self.end() if self.terminal.has_closed else self.reload.set()

    @contextmanager
    def without_loop(self, reopen_log: Callable[[], None]) -> Iterator[None]:
        """Handle signals of this process before its loop, and after it until nothing is left to be closed.

        SIGHUP opens the log anew, and lets the settings be read again once they are in use. SIGTERM and SIGINT end the
        process, unless it has been told to stop before.
        """

        def hang_up(_number: int, _frame: object) -> None:
            if self.terminal.has_closed:
                raise KeyboardInterrupt
            reopen_log()
            self.reload.set()

        def end(number: int, _frame: object) -> None:
            if not self.stop.is_set():
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(0)

        handlers = {signal.SIGHUP: hang_up, signal.SIGTERM: end, signal.SIGINT: end}
        before = {number: signal.signal(number, handle) for number, handle in handlers.items()}
        try:
            yield
        finally:
            for number, earlier in before.items():
                signal.signal(number, earlier)


class Http(Protocol):
    """The server of HTTP for an application: this process, or front ends."""

    @property
    def listening(self) -> asyncio.Event: ...

    async def listen(self) -> None:
        """Serve until `close`, and then until no answer is under way. Raises AddressInUse."""

    def close(self) -> None:
        """Take no more connections, and end when no answer is under way."""

    def abort(self) -> None:
        """Cut off all connections."""


async def serve(
    start: EngineStart,
    config: ServerConfig,
    *,
    on_ready: Callable[[str, Engine], None] = lambda _url, _engine: None,
    on_progress: Callable[[str], None] = lambda _text: None,
    signals: Signals | None = None,
    reread: Callable[[], Reread] | None = None,
    durable: DurableDirectory | None = None,
    nodes: NodePlaces | None = None,
) -> str:
    """Listen, start the engine, serve until SIGTERM or SIGINT, or until the engine has failed, then stop both.

    Returns why the engine has failed; empty if it has not.

    While the engine starts, `/health` answers and everything else is refused; `on_ready` is called with the server's
    URL and the engine once it is ready. After the first signal new calls are refused, but everything else is answered,
    until no call is open and every image of an asynchronous call was fetched or is gone. `on_progress` is called with
    what this waits for. Then the engine stops and ends what is left, and answers that are under way reach their
    clients. All that takes at most `config.drain_s`, plus the time that the engine takes to stop, and `CLOSE_S` for the
    last answers. A second signal ends the wait. SIGHUP makes the server read its settings again (see `server.reload`):
    `reread` returns them, by default those of `config`. `signals` lets a caller send signals; outside the main thread
    it is the only way.

    With a `durable` directory the server begins with the models and LoRAs that were added and the calls that are open
    there. It leaves there what is open, and images that were not fetched: a stop does not wait for them. `nodes` are
    the engine's.

    Raises:
        AddressInUse: the address cannot be listened on.
        ConfigError: a file, the address of the results or of the registry, or the name of a model cannot be used.
        JournalUnusable: the directory has open calls for another model, or was written by another version.
        OSError: results cannot be kept.
    """
    signals = signals or Signals()
    journal = None if durable is None else DurableJournal(durable.journal, durable.given_pictures())
    give_back_large_blocks()
    call_registry = new_call_registry(config, journal)
    store = new_store(config, start.now_ns, durable)
    readiness = Readiness(start, disk=None if durable is None else durable.disk, backlog=store.backlog)
    kept: dict[str, Any] = {"call_registry": call_registry, "store": store, "data": durable and durable.data}
    app = create_app(start, config, readiness=readiness, nodes=nodes, **kept)
    loop = asyncio.get_running_loop()
    listener = bind(config.host, config.port)
    http = _http(app, listener, config)
    deadline_s = loop.time()  # For a stop; set anew when one begins.
    chores = _chores(app, _url(config, listener), _reloading(app, config, reread), signals)
    engine: Engine | None = None
    async with _held(app, config, signals, listener, store, on_progress, chores):
        serving = asyncio.create_task(http.listen())
        try:
            await _first(serving, http.listening.wait())
            if not serving.done():
                engine = await _unless(signals.stop, start.start(app.state.observer))
            if engine is not None and await _unless(signals.stop, _add(engine, app)) and not signals.stop.is_set():
                with rare_collections(), _beside(_tidying(durable, journal)):
                    _begin(app, engine, config, readiness, journal)
                    on_ready(_url(config, listener), engine)
                    await _until_stop(serving, signals, engine)
                    deadline_s = loop.time() + (FAILED_S if engine.failure else config.drain_s)
                    readiness.stop_waits_for = partial(_stop_waits_for, call_registry, store, deadline_s)
                    engine.drain()
                    if is_waited_for(call_registry, store) and not engine.failure:
                        on_progress(f"draining: {readiness.stop_waits_for()}; Ctrl-C again stops at once")
                    await _until_drained(_drained(app, engine), signals, deadline_s)
        finally:
            call_registry.leave()
            if engine is not None:
                await engine.stop()
            await _close(app, http, serving, signals, deadline_s)
    return "" if engine is None else engine.failure


def _chores(app: FastAPI, url: str, reloading: Reloading, signals: Signals) -> Mapping[str, Chore]:
    return {"the set": partial(app.state.sets.run, url), "reading settings": partial(reloading.run, signals.reload)}


def _tidying(durable: DurableDirectory | None, journal: DurableJournal | None) -> Mapping[str, Chore]:
    chores: dict[str, Chore] = {"collecting garbage": sweep}
    if durable is not None and journal is not None:
        chores |= {"tidying the journal": journal.keep_tidy, "watching the disk": durable.disk.watch}
    return chores


async def _add(engine: Engine, app: FastAPI) -> bool:
    """Add the engine to the application, with the models and LoRAs that were added before this start."""
    app.state.add_engine(engine)
    images: ImageService = app.state.images
    refused = {name: one.info.loras if one.info else () for name, one in engine.not_served.items()}
    begun = {**refused, **{name: info.loras for name, info in engine.models.items()}}
    await images.additions.serve_again(engine.catalog, begun, images.entries, images.check_free)
    return True


def _begin(
    app: FastAPI, engine: Engine, config: ServerConfig, readiness: Readiness, journal: DurableJournal | None
) -> None:
    """Take over what the previous start has left, and take calls from now on."""
    app.state.images.models.check()
    if journal is not None:
        readiness.num_restored = restore(engine, journal, app.state.submitter, app.state.images.additions.gone_models)
        if config.webhook_hosts:
            app.state.webhooks.resume()
    readiness.engine = engine
    app.state.batches.resume()
    _log.info("ready: %s, %d images taken over", ", ".join(engine.models), readiness.num_restored)


def _http(app: FastAPI, listener: socket.socket, config: ServerConfig) -> Http:
    if not config.frontends:
        return HttpServer(app, listener, config, config.max_connections, app.state.open_paths)
    readiness: Readiness = app.state.readiness

    def standing() -> StandingAnswer | None:
        return None if readiness.engine is None else standing_answer(readiness.engine)

    return FrontEnds(
        app,
        listener,
        config,
        config.max_connections,
        config.frontends,
        # A refusal may name another set, of those that serve the call's model, and pages of other origins must be able
        # to read it: only the controller knows that.
        standing=standing if config.registry is None and not config.origins else lambda: None,
        on_answered=app.state.metrics.count_refused_at_front_ends,
    )


def _drained(app: FastAPI, engine: Engine) -> Coroutine[object, object, None]:
    submitter: CallSubmitter = app.state.submitter
    return drained(submitter.call_registry, submitter.store, app.state.webhooks.sender, engine.now_ns)


def _reloading(app: FastAPI, config: ServerConfig, reread: Callable[[], Reread] | None) -> Reloading:
    return Reloading(
        config=config,
        models=dict(app.state.entries),
        tenants=app.state.tenants,
        reread=reread or (lambda: Reread(config=config)),
    )


@contextmanager
def _beside(chores: Mapping[str, Chore]) -> Iterator[None]:
    """Run these chores while the block runs; a chore that fails is started again."""
    tasks = [asyncio.create_task(kept_alive(what, chore)) for what, chore in chores.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _stop_waits_for(call_registry: CallRegistry, store: ResultStore, deadline_s: float) -> str:
    """Describe what a stop waits for; `deadline_s` is on the loop's clock."""
    return waits_for(call_registry, store, deadline_s - asyncio.get_running_loop().time())


async def _until_stop(serving: asyncio.Task[None], signals: Signals, engine: Engine) -> None:
    await _first(serving, _either(signals.stop, engine.failed))
    _log.info("stopping: %s", "the engine has failed" if engine.failure else "a signal asks for it")


async def _until_drained(draining: Coroutine[object, object, None], signals: Signals, deadline_s: float) -> None:
    """Wait until the draining is done, the time is up, or a second signal asks to hurry."""
    task = asyncio.create_task(draining)
    try:
        await _first(task, signals.hurry.wait(), deadline_s)
    finally:
        task.cancel()


async def _close(app: FastAPI, http: Http, serving: asyncio.Task[None], signals: Signals, deadline_s: float) -> None:
    """Stop listening and let answers that are under way reach their clients, within limits of time."""
    if app.state.watchers is not None:
        app.state.watchers.close()
    http.close()
    await _first(serving, signals.hurry.wait(), deadline_s)
    await asyncio.wait({serving}, timeout=CLOSE_S)
    http.abort()
    await serving
    _log.info("stopped")


@asynccontextmanager
async def _held(
    app: FastAPI,
    config: ServerConfig,
    signals: Signals,
    listener: socket.socket,
    store: ResultStore,
    on_progress: Callable[[str], None],
    chores: Mapping[str, Chore],
) -> AsyncIterator[None]:
    """Hold what a server needs from its start to its end, and run its chores.

    This process may open as many files as possible from then on.

    Raises:
        AddressInUse: the port for probes cannot be listened on.
        OSError: results cannot be kept.
    """
    raise_limit()
    with _handled(signals), listener, _beside(chores):
        await store.open()
        try:
            async with probe_port(app, config.probe_port, config) as url:
                if url is not None:
                    on_progress(f"probes and metrics without a key at {url}")
                yield
        finally:
            for one in app.state.closed_last:
                await one.close()


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


@contextmanager
def _handled(signals: Signals) -> Iterator[None]:
    """Handle signals on the loop, and restore the former handlers afterwards.

    Rejected: `add_signal_handler`. When the loop gives a signal back, for a moment the next one ends the process.
    """
    loop = asyncio.get_running_loop()

    def on_loop(handle: Callable[[], None]) -> Callable[[int, object], object]:
        return lambda _number, _frame: loop.call_soon_threadsafe(handle)

    handlers = {signal.SIGTERM: signals.end, signal.SIGINT: signals.end, signal.SIGHUP: signals.hang_up}
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # Not in the main thread.
        for number, handle in handlers.items():
            before[number] = signal.signal(number, on_loop(handle))
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


async def _unless(stop: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """Return the result of the work; give it up and return None if `stop` is set first."""
    task = asyncio.create_task(work)
    try:
        await _first(task, stop.wait())
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _either(first: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiters = [asyncio.create_task(one.wait()) for one in (first, other)]
    try:
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


async def _first(
    task: asyncio.Task[Any], other: Coroutine[object, object, object], deadline_s: float | None = None
) -> None:
    """Wait until either has ended or the loop's clock shows the deadline; `task` goes on, `other` does not."""
    waiter = asyncio.create_task(other)
    timeout_s = None if deadline_s is None else max(0.0, deadline_s - asyncio.get_running_loop().time())
    try:
        await asyncio.wait({task, waiter}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
