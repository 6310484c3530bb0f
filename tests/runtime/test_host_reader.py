"""The process that reads components ahead of need, with real processes and the model that ships."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from runtime.test_worker_process import Listener, run
from stages import DIFFUSE, stage_of
from tilework.core.actions import ReadComponents
from tilework.core.model import ModelSource
from tilework.core.wire.commands import WEIGHTS, LoadWeights
from tilework.core.wire.reports import WeightsLoaded, WeightsRead
from tilework.pipelines.model_index import shipped_directory
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.models.host_reader import HostReader
from waiting import until

SOURCE = ModelSource(path=str(shipped_directory()), threads=1)
FEW = {"source": SOURCE, "weights_bytes": 1 << 30}


def weights_of(executor: LocalExecutor) -> dict[str, Path]:
    """The files in the memory of the host, by the digest of their component."""
    directory = executor._blobs.path / WEIGHTS
    return {path.name: path for path in directory.iterdir() if not path.suffix}


def read(read_id: int, *digests: str) -> ReadComponents:
    return ReadComponents(read_id, 0, stage_of("shapes", DIFFUSE), digests, 1)


def reader_of(executor: LocalExecutor) -> Any:
    """The process, once it is up."""
    return executor._reader._process


def test_what_the_host_has_forgotten_is_read_while_the_worker_does_other_things() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        (digest, file), *_ = weights_of(executor).items()
        file.unlink()
        executor.read_ahead(read(1, digest))
        await until(lambda: listener.read)
        assert listener.read == [WeightsRead(1, is_kept=True)]
        before = file.stat().st_ino
        executor.send(0, LoadWeights(5, (digest,)))
        await until(lambda: listener.reports)
        assert isinstance(listener.reports[0], WeightsLoaded)
        assert file.stat().st_ino == before, "the worker has not written it again"
        executor.read_ahead(read(2, digest, "of no model"))
        await until(lambda: len(listener.read) == 2)
        assert listener.read[1] == WeightsRead(2, is_kept=False)

    run(scenario, **FEW)


def test_a_reader_that_is_killed_is_replaced() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        (digest, file), *_ = weights_of(executor).items()
        file.unlink()
        executor.read_ahead(read(1, digest))
        await until(lambda: reader_of(executor).pid)
        os.kill(reader_of(executor).pid, signal.SIGKILL)
        await until(lambda: listener.read)
        executor.read_ahead(read(2, digest))
        await until(lambda: len(listener.read) == 2)
        assert listener.read[1] == WeightsRead(2, is_kept=True)
        assert listener.read[0].read_id == 1
        assert file.exists()

    run(scenario, **FEW)


def test_a_read_that_never_ends_is_given_up() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        digest = next(iter(weights_of(executor)))
        executor.read_ahead(read(1, digest))
        await until(lambda: listener.read)
        os.kill(reader_of(executor).pid, signal.SIGSTOP)
        executor._reader.timeout_s = 0.2
        executor.read_ahead(read(2, digest))
        await until(lambda: len(listener.read) == 2)
        assert listener.read[1] == WeightsRead(2, is_kept=False)

    run(scenario, **FEW)


def test_models_that_are_removed_cannot_be_read() -> None:
    async def scenario(executor: LocalExecutor, listener: Listener) -> None:
        reader: HostReader = executor._reader
        digest = next(iter(weights_of(executor)))
        reader.forget("shapes")
        executor.read_ahead(read(1, digest))
        await until(lambda: listener.read)
        assert listener.read == [WeightsRead(1, is_kept=False)]
        assert reader_of(executor) is None, "no process is started for it"

    run(scenario, **FEW)
