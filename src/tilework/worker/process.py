"""The process of one device: reads commands and sends reports, until it must quit or its parent has ended."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
from setproctitle import setproctitle

from tilework.comm.groups import Groups
from tilework.core.model import ModelSource, SimulatedSource, Source
from tilework.core.wire import (
    WEIGHTS,
    BreakGroup,
    Command,
    Execute,
    Loaded,
    LoadFailed,
    Quit,
    Report,
    Site,
    StopWork,
)
from tilework.pipelines.family import Family
from tilework.pipelines.identity import model_identity
from tilework.pipelines.loading import load, quiet
from tilework.pipelines.model_index import location
from tilework.pipelines.numerics import ATTENTION, pin_numerics
from tilework.worker.hardware import describe_hardware
from tilework.worker.memory import Budget
from tilework.worker.shared_weights import SharedWeights
from tilework.worker.simulated import SimulatedFamily
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker, describe
from tilework.worker.works import OpenWorks


def serve(connection: Connection, source: Source, site: Site) -> None:
    """Load the model and execute commands from `connection`, one pickled message each way at a time.

    Answers first `Loaded` or `LoadFailed` (and returns). Returns on `Quit`, and when the other end is closed, for
    which the running work is stopped at its next step. `site.device_id` chooses the device for source.device "cuda".
    """
    # Ctrl-C reaches the whole process group; when to end is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle(f"tilework: worker {site.device_id} ({_device_name(source, site.device_id)})")
    groups = Groups(site.device_id, site.rendezvous, source.device)
    link = _Link(connection, groups)
    start_ns = time.monotonic_ns()
    try:
        _prepare(source, site.device_id)
        family = _load(source, Path(site.blobs) / WEIGHTS)
        # A simulated device's memory is simulated by its family.
        budget = Budget(family.device, source.memory_bytes if isinstance(source, ModelSource) else None)
    except Exception as error:
        link.send(LoadFailed(describe(error)))
        return
    link.send(_loaded(family, source, time.monotonic_ns() - start_ns))
    worker = Worker(family, link.works, groups, StateBlobs(Path(site.blobs), site.device_id), link.send, budget)
    while not isinstance(command := link.queue.get(), Quit):
        worker.execute(command)


def _load(source: Source, weights: Path) -> Family:
    if isinstance(source, SimulatedSource):
        return SimulatedFamily(source)
    return load(source, SharedWeights(weights).share)


def _loaded(family: Family, source: Source, load_ns: int) -> Loaded:
    if isinstance(source, SimulatedSource):
        return Loaded(family.info, load_ns, hardware=source.hardware, identity=source.pipeline)
    info = replace(family.info, path=location(source.path), dtype=source.dtype, attention_backend=ATTENTION)
    return Loaded(info, load_ns, describe_hardware(family.device), model_identity(source))


def _device_name(source: Source, device_id: int) -> str:
    """The device as `ps` shows it: cuda:0, cpu, or simulated."""
    if isinstance(source, SimulatedSource):
        return "simulated"
    return f"{source.device}:{device_id}" if source.device == "cuda" else source.device


def _prepare(source: Source, device_id: int) -> None:
    quiet()
    pin_numerics(source.threads)
    if source.device == "cuda" and torch.cuda.is_available():  # If it is not, `load` says so.
        torch.cuda.set_device(device_id)


class _Link:
    """The worker's end of the pipe. A separate thread receives, so that some commands overtake queued ones."""

    def __init__(self, connection: Connection, groups: Groups) -> None:
        self._groups = groups
        self.queue: SimpleQueue[Command] = SimpleQueue()
        self.works = OpenWorks()
        self._connection = connection
        Thread(target=self._receive, name="receiver", daemon=True).start()

    def send(self, report: Report) -> None:
        # If the pipe is closed, the receiver sees it, too, and ends the process.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(report)

    def _receive(self) -> None:
        try:
            while True:
                self._route(self._connection.recv())
        except (EOFError, ConnectionResetError):
            self.works.stop_all()
            self._groups.break_all()
        finally:
            self.queue.put(Quit())

    def _route(self, command: Command) -> None:
        match command:
            case StopWork():
                self.works.stop(command.work_id)
            case BreakGroup():
                self._groups.break_off(command.group_id)
            case Execute():
                self.works.open(command.work_id, command.revoked)
                self.queue.put(command)
            case _:
                self.queue.put(command)
