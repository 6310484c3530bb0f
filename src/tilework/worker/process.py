"""The process of one device: reads commands and sends reports, until it must quit or its parent has ended."""

from __future__ import annotations

import gc
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import torch
from setproctitle import setproctitle

from tilework.comm.groups import Groups
from tilework.comm.messages import receive_messages, send_message
from tilework.comm.sender import Sender
from tilework.core.component import Component
from tilework.core.model import ATTENTIONS, ModelInfo, ModelSource, SimulatedSource, Source
from tilework.core.wire.commands import (
    WEIGHTS,
    BreakGroup,
    Command,
    EnterNode,
    Execute,
    Quit,
    ReadWeights,
    Site,
    StartOver,
    StopWork,
)
from tilework.core.wire.reports import Loaded, LoadedModel, LoadFailed, ModelRead, NotLoaded, Report, Sized
from tilework.pipelines.cuda.copies import DIRECT, CudaStreams, SideCopies
from tilework.pipelines.errors import InvalidSource, ModelError, describe
from tilework.pipelines.family import Family
from tilework.pipelines.loading import device_of, load, quiet
from tilework.pipelines.model_index import name_of
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.video.exporter import Exporter, can_export, check_export
from tilework.pipelines.workflow.loading import load_on_slot
from tilework.pipelines.workflow.source import is_workflow
from tilework.worker.hardware import DeviceFailed, describe_hardware
from tilework.worker.log_lines import log_to_stderr
from tilework.worker.memory import Budget
from tilework.worker.models.cell import Cell
from tilework.worker.models.describe import described
from tilework.worker.models.loads import WeightsNotLoaded
from tilework.worker.models.loads_ahead import LoadsAhead
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.models import Models
from tilework.worker.models.on_demand import load_on_demand
from tilework.worker.models.reader import read_ahead
from tilework.worker.models.shared_weights import SharedWeights
from tilework.worker.models.sizes import size_of
from tilework.worker.models.skeleton import leave_skeleton, take_over
from tilework.worker.models.weights import Weights
from tilework.worker.readings import report_readings
from tilework.worker.simulated import SimulatedFamily
from tilework.worker.start.anew import begin_anew, was_born_with_cuda
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker
from tilework.worker.works import OpenWorks


def serve(connection: socket.socket, sources: Sequence[Source], site: Site) -> None:
    """Load the models and execute commands from `connection`, a pipe for messages both ways (`comm.messages`).

    All `sources` have one device, number of threads and memory. Answers first `Loaded` or `LoadFailed` (and returns).
    Returns on `Quit`, and when the other end is closed, which stops the running work at its next step. Returns with
    `LoadFailed` if weights cannot be loaded, or the device has failed. `site.device_id` chooses the device for
    source.device "cuda".
    """
    # Ctrl-C and SIGHUP may reach the whole process group; the parent decides when this process ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr(site.log_level)
    source = sources[0]
    if source.device == "cuda" and was_born_with_cuda():
        begin_anew(connection, sources, site)
    place = f", cell of {', '.join(map(str, site.cell))}" if site.cell else ""
    setproctitle(f"tilework: worker {site.device_id} ({_device_name(source, site.device_id)}{place})")
    link = _PipeEnd(connection, partial(Groups, site.device_id, site.rendezvous, site.collectives, site.link_timeout_s))
    start_ns = time.monotonic_ns()
    try:
        _prepare(source, site.device_id)
        if site.for_others:
            link.send(_read_for_workers(source, site, start_ns))
            link.wait()
            return
        if site.sizes:
            link.send(Sized(tuple(size_of(one) for one in sources if isinstance(one, ModelSource))))
            link.wait()
            return
        if site.reads:
            _read_for_others(link, site)
            return
        copies = _side_copies(source, site.device_id)
        models, loaded = _load(sources, site, start_ns, copies)
        # The family simulates a simulated device's memory.
        budget = Budget(models.device, source.memory_bytes if isinstance(source, ModelSource) else None)
    except Exception as error:
        link.send(LoadFailed(describe(error)))
        return
    link.send(loaded)
    report_readings(models.device, link.send)
    blobs = StateBlobs(Path(site.blobs), site.device_id, copies=copies or DIRECT)
    sender = Sender(link.send, link.fail, partial(_side_stream, models.device, site.device_id))
    worker = Worker(
        models,
        link.works,
        link.groups,
        blobs,
        sender.send,
        budget,
        states_bytes=site.states_bytes,
        cache_bytes=site.cache_bytes,
        loads_ahead=link.loads_ahead.take,
        emit_made=sender.send_made,
    )
    try:
        _execute_all(link, worker)
    except (WeightsNotLoaded, DeviceFailed) as error:
        sender.send(LoadFailed(str(error)))
    sender.finish()


def _execute_all(link: _PipeEnd, worker: Worker) -> None:
    """Execute commands until `Quit`; while there is none, load what is left to be loaded."""
    while True:
        while link.queue.empty() and worker.loads.load_block():
            pass
        command = link.queue.get()
        if isinstance(command, Quit):
            return
        worker.execute(command)
        link.loads_ahead.executed(command)


def _read_for_workers(source: Source, site: Site, start_ns: int) -> ModelRead:
    """Read a model for workers that serve already."""
    assert isinstance(source, ModelSource)
    model, skeleton = leave_skeleton(source, Weights(SharedWeights(Path(site.blobs) / WEIGHTS), _cell(site)))
    return ModelRead(Loaded((model,), time.monotonic_ns() - start_ns), skeleton)


def _read_for_others(link: _PipeEnd, site: Site) -> None:
    """Read components ahead of need until the end."""
    files = SharedWeights(Path(site.blobs) / WEIGHTS)
    while isinstance(command := link.queue.get(), ReadWeights):
        link.send(read_ahead(command, files))


def _load(sources: Sequence[Source], site: Site, start_ns: int, copies: SideCopies | None) -> tuple[Models, Loaded]:
    """Load models; return those that can be loaded, and the report about all.

    With `loads_on_demand` none has weights on the device. A worker that replaces another raises the reason if it can
    load no model.
    """
    files = SharedWeights(Path(site.blobs) / WEIGHTS, copies)
    weights = Weights(files, _cell(site)) if site.loads_on_demand else None
    loras = WorkerLoras(on_demand=weights is not None)
    families: dict[str, Family] = {}
    components: dict[str, Mapping[str, Component]] = {}
    loaded: list[LoadedModel] = []
    not_loaded: list[NotLoaded] = []
    for place, (source, info) in enumerate(zip_longest(sources, site.infos)):
        begin_ns = time.monotonic_ns()
        try:
            if weights is None or not isinstance(source, ModelSource):
                family, model, parts = _whole(source, info, files, loras)
            elif weights.cell is None:
                family, model, parts = load_on_demand(source, weights, loras)
            else:
                family, model, parts = _split(source, weights, loras)
            check_export(family.info)
        except Exception as error:
            if site.replaces and source is sources[-1] and not families:
                raise
            not_loaded.append(NotLoaded(place, _name(source), _why(source, error)))
            gc.collect()  # Frees what the model has loaded so far.
            continue
        name = family.info.name
        if name in families:
            raise InvalidSource(f"two models are called {name!r}; give one another name: NAME={_location(source)}")
        families[name] = family
        components[name] = parts
        loaded.append(replace(model, load_ns=time.monotonic_ns() - begin_ns))
    broken = {one.name: f"{one.name} cannot be loaded any more: {one.reason}" for one in not_loaded}
    models = Models(families, _device(sources[0]), weights, components, broken, loras)
    hardware = sources[0].hardware if isinstance(sources[0], SimulatedSource) else describe_hardware(models.device)
    return models, Loaded(tuple(loaded), time.monotonic_ns() - start_ns, hardware, tuple(not_loaded))


_Read = tuple[Family, LoadedModel, Mapping[str, Component]]
"""A model, its description for the server, and its components by name."""


def _whole(source: Source, info: ModelInfo | None, files: SharedWeights, loras: WorkerLoras) -> _Read:
    """Load a model that is whole on the device all the time."""
    family = _family(source, info, files)
    usable, refused = loras.add_all(family, source)
    return family, described(family, source, {}, usable, refused), {}


def _split(source: ModelSource, weights: Weights, loras: WorkerLoras) -> _Read:
    """Load a model that is never whole on any device, not even while it is read."""
    model, skeleton = leave_skeleton(source, weights)
    family, parts = take_over(source, skeleton, weights, loras, torch.device(source.device))
    return family, model, parts


def _cell(site: Site) -> Cell | None:
    return Cell(site.cell, site.device_id) if site.cell else None


def _family(source: Source, info: ModelInfo | None, files: SharedWeights) -> Family:
    """Load a model with its weights on the device: on CPUs in `files` that other workers share.

    A CPU slot knows the model's info, and needs no weights if it only writes videos or runs a workflow's stages.
    """
    if isinstance(source, SimulatedSource):
        return SimulatedFamily(source)
    if info is not None and can_export(info):
        return Exporter(info)
    if info is not None and is_workflow(source.path):
        return load_on_slot(source, info)
    return load(source, files.share if source.device == "cpu" else None)


def _name(source: Source) -> str:
    return source.pipeline if isinstance(source, SimulatedSource) else name_of(source)


def _why(source: Source, error: Exception) -> str:
    """Return why a model cannot be loaded, without its path: clients read it, and must not learn the path."""
    reason = str(error) if isinstance(error, ModelError) else describe(error)
    if isinstance(source, SimulatedSource) or not ("/" in source.path or Path(source.path).exists()):
        return reason
    for path in (str(Path(source.path).resolve()), source.path):
        reason = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", _name(source), reason)
    return reason


def _device(source: Source) -> torch.device:
    return torch.device("cpu") if isinstance(source, SimulatedSource) else device_of(source)


def _location(source: Source) -> str:
    return source.pipeline if isinstance(source, SimulatedSource) else source.path


def _side_copies(source: Source, device_id: int) -> SideCopies | None:
    """Return copies by a separate stream, if they are asked for on a device that has streams."""
    is_asked_for = isinstance(source, ModelSource) and source.copy_stream and source.device == "cuda"
    return SideCopies(CudaStreams(torch.device("cuda", device_id))) if is_asked_for and _has_cuda() else None


def _side_stream(device: torch.device, device_id: int) -> AbstractContextManager[object]:
    """Enter a separate stream of the device for this thread, so that its copies do not wait for a run."""
    if device.type != "cuda":
        return nullcontext()
    streams = CudaStreams(torch.device("cuda", device_id))
    return streams.entered(streams.new())


def _has_cuda() -> bool:
    """Return whether CUDA can be used. If it cannot, `load` says so."""
    return torch.cuda.is_available()


def _device_name(source: Source, device_id: int) -> str:
    """Return the device as `ps` shows it: cuda:0, cpu, or simulated."""
    if isinstance(source, SimulatedSource):
        return "simulated"
    return f"{source.device}:{device_id}" if source.device == "cuda" else source.device


def _prepare(source: Source, device_id: int) -> None:
    quiet()
    pin_numerics(source.threads, source.attention if isinstance(source, ModelSource) else ATTENTIONS[0])
    if source.device == "cuda" and _has_cuda():
        torch.cuda.set_device(device_id)


class _PipeEnd:
    """The worker's end of the pipe. A separate thread receives, so that some commands overtake queued ones."""

    def __init__(self, connection: socket.socket, groups: Callable[..., Groups]) -> None:
        self.groups = groups(tell=self.send)
        self.queue: SimpleQueue[Command] = SimpleQueue()
        self.works = OpenWorks()
        self.loads_ahead = LoadsAhead()
        self._connection = connection
        self._sending = Lock()
        Thread(target=self._receive, name="receiver", daemon=True).start()

    def wait(self) -> None:
        """Wait for `Quit`, or until the other end is closed."""
        while not isinstance(self.queue.get(), Quit):
            pass

    def send(self, report: Report) -> None:
        with self._sending:
            try:
                send_message(self._connection, report)
            except (BrokenPipeError, ConnectionResetError):
                pass  # The receiver also notices that the other end is closed, and ends the process.
            except BaseException:  # Perhaps a part was sent, and nothing may follow it. The process ends as above.
                self._connection.shutdown(socket.SHUT_RDWR)
                raise

    def fail(self, error: Exception) -> None:
        """Report why nothing more can be sent, and end the process as above."""
        self.send(LoadFailed(f"its results cannot be sent: {describe(error)}"))
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        try:
            for command in receive_messages(self._connection):
                self._route(command)
            self.works.stop_all()
            self.groups.break_all()
        finally:
            self.queue.put(Quit())

    def _route(self, command: Command) -> None:
        match command:
            case StopWork():
                self.works.stop(command.work_id)
            case BreakGroup():
                self.groups.break_off(command.group_id)
            case EnterNode():
                self.groups.enter(command.node)
            case Execute():
                self.works.open(command.work_id, dict(command.members), command.revoked)
                self._queue_up(command)
            case StartOver():
                self.works.stop_all()
                self._queue_up(command)
            case _:
                self._queue_up(command)

    def _queue_up(self, command: Command) -> None:
        self.loads_ahead.receive(command)
        self.queue.put(command)
