"""Worker processes that die, stop or do not start, seen from the executor; the event loop never waits for one."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from commands import MODEL, decode, encode, steps
from processes import is_alive
from stages import DIFFUSE
from tilework.comm.messages import encode_message
from tilework.core.cost_row import CostRow
from tilework.core.model import ModelSource, SimulatedSource, Source
from tilework.core.request import Shape
from tilework.core.wire.commands import Command, Forget, StopWork
from tilework.core.wire.reports import Ended, Ending, Progress, Report, WeightsRead
from tilework.core.wire.spec import Spec
from tilework.pipelines.model_index import shipped_directory
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.models.measuring import Measuring
from waiting import PATIENCE_S, eventually, until

ROWS = (CostRow(pipeline=MODEL, stage=DIFFUSE, height=64, width=64, seconds=0.01),)
MODELLED = SimulatedSource(pipeline=MODEL, hardware="none", steps=5, rows=ROWS)


@dataclass
class Listener:
    """Remembers what it was told."""

    reports: list[Report] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    has_given_up: bool = False
    ready: list[int] = field(default_factory=list)
    read: list[WeightsRead] = field(default_factory=list)

    def on_read(self, read: WeightsRead) -> None:
        self.read.append(read)

    def on_report(self, device_id: int, report: Report) -> None:
        self.reports.append(report)

    def on_lost(self, device_id: int, reason: str) -> None:
        self.lost.append((device_id, reason))

    def on_links_changed(self) -> None: ...
    def on_joined(self, device_id: int) -> None:
        self.joined.append(device_id)

    def on_loading(self, num_ready: int) -> None:
        self.ready.append(num_ready)

    def on_given_up(self, left: Collection[int]) -> None:
        self.has_given_up = not left


def run(
    scenario: Callable[[LocalExecutor, Listener], Coroutine[Any, Any, None]],
    num_workers: int = 1,
    source: Source = MODELLED,
    **config: Any,
) -> None:
    """Play a scenario on workers that are up."""

    async def play() -> None:
        options: dict[str, Any] = {"restart_delay_s": 0.05, "stop_grace_s": 2.0} | config
        executor = LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,), **options))
        listener = Listener()
        await executor.start(listener)
        try:
            await scenario(executor, listener)
        finally:
            await executor.stop()

    asyncio.run(play())


def send_signal(executor: LocalExecutor, device_id: int, number: signal.Signals) -> None:
    pid = executor.pids.get(str(device_id))
    assert pid is not None
    os.kill(pid, number)


def test_a_suspended_worker_blocks_no_other_and_can_be_killed() -> None:
    """Ten times what its pipe holds is sent to it; then it is killed, with its pipe full.

    If the event loop waited for it, it would wait for ever.
    """

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        send_signal(executor, 0, signal.SIGSTOP)
        for job_id in range(20_000):
            executor.send(0, Forget(job_id))
            if job_id % 1000 == 0:
                await asyncio.sleep(0)
        executor.kill(0, "it made no progress for 20 s")
        await until(lambda: listener.joined)
        assert listener.lost == [(0, "it made no progress for 20 s")]

    run(scenario)


def test_a_worker_that_reports_what_cannot_be_is_lost_and_nothing_else() -> None:
    """Nothing that it reports then is heard; it is started again, and counted."""

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        worker = executor._workers[0]
        said = Progress(7, -5), Progress(7, 1)
        whole = b"".join(bytes(piece) for one in said for piece in encode_message(one))
        worker.get_buffer(len(whole))[: len(whole)] = whole
        worker.buffer_updated(len(whole))
        await until(lambda: listener.joined)
        assert listener.lost == [(0, "it has sent an impossible report: work 7 does not run on device 0")]
        assert not listener.reports
        assert executor.bad_reports == {0: 1}

    run(scenario)


def test_a_work_is_stopped_that_waits_for_a_command_that_is_to_come() -> None:
    """It has not been sent yet, so the worker could not know what to stop; and nothing may come after all."""

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        coming: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        executor.send(0, coming)
        spec = Spec(prompt="", height=64, width=64, steps=5, guidance_scale=1.0, seed=0)
        executor.send(0, encode(1, 1, spec))
        executor.send(0, encode(2, 2, spec))
        executor.send(0, StopWork(1))
        coming.set_result(None)
        await until(lambda: len(listener.reports) == 2)
        first, second = listener.reports
        assert isinstance(first, Ended)
        assert isinstance(second, Ended)
        assert (first.work_id, first.steps_done, first.ending) == (1, 0, Ending.STOPPED)
        assert (second.work_id, second.steps_done, second.ending) == (2, 1, Ending.DONE)

    run(scenario)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_picture_has_not_reported_it() -> None:
    """Its pipe holds the beginning of 12 MB."""

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        spec = Spec(prompt="", height=2048, width=2048, steps=1, guidance_scale=1.0, seed=0)
        executor.send(0, encode(1, 1, spec))
        executor.send(0, steps(2, ((1, 0),), 1))
        await until(lambda: len(listener.reports) == 2)
        transport = executor._workers[0]._transport
        assert transport is not None
        connection = transport.get_extra_info("socket")
        executor.send(0, decode(3, 1, num_steps=1))
        eventually(lambda: _num_waiting(connection.fileno()))  # The event loop does not read meanwhile.
        send_signal(executor, 0, signal.SIGKILL)
        await until(lambda: listener.joined)
        assert listener.lost == [(0, "it was killed by signal 9")]
        assert len(listener.reports) == 2
        executor.send(0, encode(4, 2, spec))
        await until(lambda: len(listener.reports) == 3)

    run(scenario)


def _num_waiting(descriptor: int) -> int:
    """How many bytes can be read."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_worker_that_was_lost_leaves_no_open_file_and_no_timer() -> None:
    """A server that is up for a month loses many. Files do not wait for the collector of garbage."""

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        num_open = set[int]()
        for number in range(1, 4):
            send_signal(executor, 0, signal.SIGKILL)
            await until(partial(_has_joined, listener, number))
            num_open.add(len(os.listdir("/proc/self/fd")))
            assert executor._start_timers == {}
        assert len(num_open) == 1

    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()


def _has_joined(listener: Listener, times: int) -> bool:
    return len(listener.joined) == times


def test_all_workers_killed_at_once_are_restarted() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        for device_id in range(3):
            send_signal(executor, device_id, signal.SIGKILL)
        await until(lambda: sorted(listener.joined) == [0, 1, 2])
        assert {reason for _, reason in listener.lost} == {"it was killed by signal 9"}

    run(scenario, num_workers=3)


@pytest.mark.slow
def test_a_worker_that_hangs_while_restarting_is_killed_and_restarted() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        executor._config = replace(executor._config, start_timeout_s=5.0)
        first = executor.pids.get("0")
        send_signal(executor, 0, signal.SIGKILL)
        await until(lambda: executor.pids.get("0") not in (first, None))
        send_signal(executor, 0, signal.SIGSTOP)
        await until(lambda: listener.joined)
        assert listener.lost[1] == (0, "it did not load within 5 s")

    run(scenario, source=ModelSource(path="shapes"))


def test_a_worker_that_repeatedly_fails_to_load_is_given_up_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again in growing intervals."""
    model = tmp_path / "model"
    model.symlink_to(shipped_directory())

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        model.unlink()
        send_signal(executor, 0, signal.SIGKILL)
        await until(lambda: listener.has_given_up)
        assert listener.lost[0] == (0, "it was killed by signal 9")
        assert len(listener.lost) == 4
        assert all(str(model) in reason for _, reason in listener.lost[1:])

    run(scenario, source=ModelSource(path=str(model)), max_restarts=3)
    told = [record.message.rpartition("; ")[2] for record in caplog.records if "was lost" in record.message]
    assert told == [f"it is restarted in {delay} s" for delay in (0.05, 0.05, 0.1)] + ["it is given up"]


def test_a_worker_that_dies_while_another_loads_fails_the_start(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        executor = LocalExecutor(LocalConfig(num_workers=2, sources=(ModelSource(path="shapes"),), stop_grace_s=2.0))
        starting = asyncio.create_task(executor.start(Listener()))
        await until(lambda: executor.pids.get("1") is not None)
        send_signal(executor, 1, signal.SIGKILL)
        with pytest.raises(WorkerStartFailed, match="worker 1 ended before it could serve: it was killed by signal 9"):
            await starting

    asyncio.run(start())
    assert "was lost" not in caplog.text, "none is started again"


@pytest.mark.slow
def test_when_the_forkserver_is_killed_the_workers_live_and_new_ones_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one takes seconds to come up, for which nobody waits but the worker that is to be started."""

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        before = executor.pids.get("1")
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{pid}").exists())  # It is no zombie, though no worker is to be started.
        send_signal(executor, 0, signal.SIGKILL)
        await until(lambda: listener.joined)
        assert listener.joined == [0]
        assert executor.pids.get("1") == before
        send_signal(executor, 1, signal.SIGSTOP)
        executor.kill(1, "by a new forkserver's parent")
        await until(lambda: listener.joined == [0, 1])
        assert listener.lost[-1] == (1, "by a new forkserver's parent")

    start, threads = forkserver.ForkServer.ensure_running, set[int]()

    def noted(self: forkserver.ForkServer) -> None:
        threads.add(threading.get_ident())
        start(self)

    monkeypatch.setattr(forkserver._forkserver, "ensure_running", partial(noted, forkserver._forkserver))  # type: ignore[attr-defined]
    run(scenario, num_workers=2)
    assert threads
    assert threading.get_ident() not in threads, "the event loop has waited for it"


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_forkserver_that_starts_no_worker() -> None:
    """It may still import. Here it stands still."""

    async def scenario() -> None:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        executor = LocalExecutor(LocalConfig(num_workers=2, sources=(ModelSource(path="shapes"),), stop_grace_s=0.2))
        starting = asyncio.create_task(executor.start(Listener()))
        await until(lambda: len(executor._workers) == 2)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.wait_for(executor.stop(), PATIENCE_S)

    async def nothing(_executor: LocalExecutor, _listener: Listener) -> None: ...

    run(nothing)  # There is one.
    asyncio.run(scenario())
    run(nothing)


@pytest.mark.slow
def test_workers_that_outlive_the_forkserver_end_with_the_executor() -> None:
    """Also one that has stopped: multiprocessing takes both for dead."""
    pids: list[int] = []

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        pids.extend(pid for device_id in range(2) if (pid := executor.pids.get(str(device_id))) is not None)
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        os.kill(pids[0], signal.SIGSTOP)

    run(scenario, num_workers=2)
    assert len(pids) == 2
    eventually(lambda: not any(map(is_alive, pids)))  # They are killed, but nobody's children, to be waited for.


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_start_that_is_cancelled_is_quiet(num_workers: int) -> None:
    """Its workers end."""
    complaints: list[dict[str, Any]] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        executor = LocalExecutor(LocalConfig(num_workers=num_workers, sources=(MODELLED,)))
        starting = asyncio.create_task(EngineStart(EngineConfig(), executor).start())
        await until(lambda: executor._workers)
        starting.cancel()
        await asyncio.wait({starting})
        assert not executor.pids

    asyncio.run(play())
    gc.collect()
    assert not complaints


def test_a_start_of_which_no_model_can_run_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_args: object) -> None:
        raise WorkerStartFailed("no model can run here")

    async def play() -> None:
        executor = LocalExecutor(LocalConfig(num_workers=1, sources=(MODELLED,)))
        with pytest.raises(WorkerStartFailed, match="no model can run here"):
            await EngineStart(EngineConfig(), executor).start()
        assert not executor.pids

    monkeypatch.setattr(Measuring, "start", fail)
    asyncio.run(play())


def test_a_node_that_is_told_to_end_while_the_engine_starts_is_let_go_when_it_has() -> None:
    """Before that it may be measuring."""

    async def play() -> None:
        starting = EngineStart(EngineConfig(), LocalExecutor(LocalConfig(num_workers=1, sources=(MODELLED,))))
        has_started = list[bool]()
        starting.on_node_leaving(1, (), "its agent was told to end", lambda: has_started.append(True))
        assert not has_started
        engine = await starting.start()
        assert has_started == [True]
        await engine.stop()

    asyncio.run(play())


@pytest.mark.slow
def test_a_measurement_that_is_cancelled_is_quiet() -> None:
    """The worker measures on, and says so; then it says that it does not know the job that is asked for."""
    complaints: list[dict[str, Any]] = []

    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        measuring = asyncio.create_task(executor.calibrate(MODEL, ((Shape(64, 64),),)))
        await asyncio.sleep(0)
        measuring.cancel()
        await asyncio.wait({measuring})
        executor.send(0, decode(1, 1))
        await until(lambda: listener.reports)

    run(scenario)
    assert not complaints


_TRACKED = """
import os, signal
from multiprocessing import resource_tracker
from tilework.runtime.worker_process import forkserver_context
context = forkserver_context()
resource_tracker.ensure_running()
tracker = resource_tracker._resource_tracker._pid
os.kill(tracker, signal.SIGKILL)
os.waitid(os.P_PID, tracker, os.WEXITED | os.WNOWAIT)
semaphore = context.Semaphore()
os._exit(0)
"""


def test_what_a_killed_process_leaves_to_multiprocessing_is_no_warning_for_the_user() -> None:
    """Its tracker was killed and is started again; and the semaphore of a process that was killed is unlinked by it."""
    process = subprocess.run([sys.executable, "-c", _TRACKED], capture_output=True, text=True, check=True)
    assert process.stderr == ""
