"""Real worker processes from a forkserver, driven through their pipes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import tilework
import tiny
from birth import report_birth
from commands import MODEL, decode, encode, steps
from lazy_streams import LazyStreams
from tilework.comm.groups import Groups
from tilework.comm.messages import receive_messages, send_message
from tilework.core.model import ModelSource
from tilework.core.wire.commands import Command, Quit, Site, StartOver, StopWork
from tilework.core.wire.reports import Ended, Ending, Loaded, LoadFailed, Progress, Report, StartedOver
from tilework.pipelines.errors import LibraryMissing
from tilework.runtime.worker_process import forkserver_context
from tilework.worker import hardware, process
from tilework.worker.process import _PipeEnd, _side_stream, serve
from tilework.worker.start.anew import begin_anew
from waiting import PATIENCE_S

SITE = Site(device_id=0, blobs=tempfile.mkdtemp(prefix="blobs-", dir=os.environ["XDG_CACHE_HOME"]))


def drive(connection: socket.socket, worker: socket.socket) -> None:
    """Body of a process that sets a worker a long work, says so, and then waits to be killed."""
    worker.settimeout(None)
    send_message(worker, encode(1, 1, tiny.spec(steps=100_000)))
    send_message(worker, steps(2, ((1, 0),), 100_000))
    for report in receive_messages(worker):
        if report == Progress(2, 1):
            break
    send_message(connection, "begun")
    signal.pause()


def serve_interruptibly(connection: socket.socket, source: ModelSource) -> None:
    """Body of a worker whose shell has not set it to ignore Ctrl-C already."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(connection, (source,), SITE)


def serve_on_failed_device(connection: socket.socket, source: ModelSource) -> None:
    """Body of a worker whose device has failed once a work has."""
    hardware.has_failed = lambda _device: True
    serve(connection, (source,), SITE)


class Child:
    """A process from the forkserver and our end of its pipe."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = forkserver_context()
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(PATIENCE_S)
        self._reports = receive_messages(self.connection)
        self.process: BaseProcess = context.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def send(self, *commands: Command) -> None:
        for command in commands:
            send_message(self.connection, command)

    def receive(self) -> Any:
        return next(self._reports)

    def receive_until_end_of(self, work_id: int) -> list[Report]:
        reports: list[Report] = [self.receive()]
        while not (isinstance(reports[-1], Ended) and reports[-1].work_id == work_id):
            reports.append(self.receive())
        return reports

    def exit_code(self) -> int | None:
        self.process.join(PATIENCE_S)
        return self.process.exitcode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    tiny.prepare()
    directory = tmp_path_factory.mktemp("sd3")
    tiny.save_sd3(directory)
    return ModelSource(path=str(directory), name=MODEL)


@pytest.fixture
def worker(source: ModelSource) -> Iterator[Child]:
    child = Child(serve, (source,), SITE)
    assert isinstance(child.receive(), Loaded)
    yield child
    if child.process.is_alive():
        child.process.kill()
    child.process.join()


@pytest.mark.slow
def test_the_preload_took_effect() -> None:
    Child(report_birth).receive()
    child = Child(report_birth)
    preloaded, imported = child.receive()
    assert preloaded
    assert imported == []
    assert child.exit_code() == 0


def test_a_request_through_the_pipe_equals_the_stock_pipeline(source: ModelSource, worker: Child) -> None:
    stock = tilework.reference(source.path)
    worker.send(encode(1, 1, tiny.spec()), steps(2, ((1, 0),), 4), decode(3, 1))
    reports = worker.receive_until_end_of(3)
    assert [report for report in reports if isinstance(report, Progress)] == [Progress(2, step) for step in (1, 2, 3)]
    assert isinstance(reports[-1], Ended)
    assert np.array_equal(tiny.pixels(reports[-1].images[1]), tiny.run_stock(stock, tiny.spec()).pixels)
    worker.send(Quit())
    assert worker.exit_code() == 0


def test_a_worker_without_pyav_refuses_a_model_of_clips_before_any_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    _, loaded = process._load((ModelSource(path="shapes-motion"),), SITE, 0, None)
    assert (loaded.models, ["PyAV" in one.reason for one in loaded.not_loaded]) == ((), [True])
    with pytest.raises(LibraryMissing, match="PyAV"):
        process._load((ModelSource(path="shapes-motion"),), replace(SITE, replaces=True), 0, None)


def test_a_worker_that_quits_has_sent_its_results(worker: Child) -> None:
    """More than the pipe holds, which nobody reads until the worker has been told to quit."""
    sides = (192, 64, 176, 192, 160, 192)
    for job_id, side in enumerate(sides):
        first = 3 * job_id
        spec = tiny.spec(height=side, width=side, steps=1)
        worker.send(encode(first, job_id, spec), steps(first + 1, ((job_id, 0),), 1), decode(first + 2, job_id, 1))
    worker.send(Quit())
    reports = [report for report in worker.receive_until_end_of(17) if isinstance(report, Ended)]
    assert [report.work_id for report in reports] == list(range(18))
    assert [image.height for report in reports for image in report.images.values()] == list(sides)
    assert worker.exit_code() == 0


def test_a_report_that_cannot_be_sent_ends_the_process() -> None:
    """Also if a thread of its own sends it: nobody would see that the work has ended."""

    class Unsendable:
        def __reduce__(self) -> NoReturn:
            raise ValueError("as a tensor that is gone")

    ours, theirs = socket.socketpair()
    link = _PipeEnd(theirs, partial(Groups, 0, ""))
    with pytest.raises(ValueError, match="as a tensor that is gone"):
        link.send(Unsendable())  # type: ignore[arg-type]
    assert link.queue.get(timeout=PATIENCE_S) == Quit()
    assert ours.recv(1) == b""


def test_results_that_cannot_be_sent_end_the_process_with_a_reason() -> None:
    ours, theirs = socket.socketpair()
    link = _PipeEnd(theirs, partial(Groups, 0, ""))
    link.fail(RuntimeError("no stream"))
    assert link.queue.get(timeout=PATIENCE_S) == Quit()
    assert list(receive_messages(ours)) == [LoadFailed("its results cannot be sent: RuntimeError: no stream")]


def test_results_leave_by_a_stream_of_their_own_of_the_workers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, devices = LazyStreams(), list[torch.device]()
    monkeypatch.setattr(process, "CudaStreams", lambda device: (devices.append(device), streams)[1])
    with _side_stream(torch.device("cpu"), 3):
        assert not devices
    with _side_stream(torch.device("cuda"), 3):
        assert devices == [torch.device("cuda", 3)]
        assert streams.current() is streams.side


def test_a_stop_overtakes_what_is_queued(worker: Child) -> None:
    worker.send(
        encode(1, 1, tiny.spec(steps=100_000)),
        steps(2, ((1, 0),), 100_000),
        steps(3, ((1, 9),), 1),
        encode(4, 2, tiny.spec()),
    )
    while worker.receive() != Progress(2, 1):
        pass
    worker.send(StopWork(3), StopWork(2))
    ended = [report for report in worker.receive_until_end_of(4) if isinstance(report, Ended)]
    assert [(report.work_id, report.ending is Ending.STOPPED) for report in ended] == [(2, True), (3, True), (4, False)]
    assert 1 <= ended[0].steps_done < 100_000
    assert (ended[1].steps_done, ended[2].steps_done) == (0, 1)


def test_to_start_over_stops_what_came_before(worker: Child) -> None:
    worker.send(encode(1, 1, tiny.spec(steps=100_000)), steps(2, ((1, 0),), 100_000), steps(3, ((1, 9),), 1))
    while worker.receive() != Progress(2, 1):
        pass
    worker.send(StartOver(), encode(1, 1, tiny.spec()))
    reports = [report for report in worker.receive_until_end_of(1) if not isinstance(report, Progress)]
    ended = [report for report in reports if isinstance(report, Ended)]
    assert [(report.work_id, report.ending is Ending.STOPPED) for report in ended] == [(2, True), (3, True), (1, False)]
    assert reports.index(StartedOver()) == len(reports) - 2, "what came before has ended"


def test_ctrl_c_is_left_to_the_parent(source: ModelSource) -> None:
    worker = Child(serve_interruptibly, source)
    assert isinstance(worker.receive(), Loaded)
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGINT)
    worker.send(encode(1, 1, tiny.spec()), Quit())
    assert isinstance(worker.receive(), Ended)
    assert worker.exit_code() == 0


def test_a_worker_whose_device_has_failed_says_so_and_ends(source: ModelSource) -> None:
    """Then it is started again, which is all that helps."""
    worker = Child(serve_on_failed_device, source)
    try:
        assert isinstance(worker.receive(), Loaded)
        worker.send(replace(encode(1, 1, tiny.spec()), stage="none of its stages"))
        report = worker.receive()
        assert isinstance(report, LoadFailed), report
        assert report.reason.startswith("its device has failed: KeyError")
        assert worker.exit_code() == 0
    finally:
        worker.process.kill()


def test_a_closed_pipe_ends_the_process_in_the_middle_of_a_work(worker: Child) -> None:
    worker.send(encode(1, 1, tiny.spec(steps=100_000)), steps(2, ((1, 0),), 100_000))
    while worker.receive() != Progress(2, 1):
        pass
    worker.connection.close()
    assert worker.exit_code() == 0


def test_a_worker_ends_when_its_parent_is_killed(worker: Child) -> None:
    parent = Child(drive, worker.connection)
    worker.connection.close()  # Now only the parent has that end.
    assert parent.receive() == "begun"
    parent.process.kill()
    assert worker.exit_code() == 0


def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    """A first worker waits for others that may be added; one that replaces it ends."""
    child = Child(serve, (ModelSource(path="/nowhere"),), SITE)
    report = child.receive()
    assert isinstance(report, Loaded), report
    (failed,) = report.not_loaded
    assert (report.models, failed.place) == ((), 0)
    assert failed.reason.startswith("path is '/nowhere', which does not exist")
    child.send(Quit())
    assert child.exit_code() == 0
    child = Child(serve, (ModelSource(path="/nowhere"),), replace(SITE, replaces=True))
    report = child.receive()
    assert isinstance(report, LoadFailed)
    assert report.reason.startswith("ModelNotFound: path is '/nowhere'")
    assert child.exit_code() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_does_not_exist_is_reported(source: ModelSource) -> None:
    child = Child(serve, (replace(source, device="cuda"),), SITE)
    report = child.receive()
    assert isinstance(report, LoadFailed)
    assert f"device is 'cuda', and torch {torch.__version__}, built for" in report.reason
    assert child.exit_code() == 0


@pytest.mark.slow
def test_a_worker_that_begins_anew_serves_in_the_same_process(source: ModelSource) -> None:
    child = Child(begin_anew, (source,), SITE)
    loaded = child.receive()
    assert isinstance(loaded, Loaded)
    assert loaded.models[0].info.name == MODEL
    assert child.process.is_alive(), "it has kept its process id"
    child.send(Quit())
    assert child.exit_code() == 0
