"""The process that reads components ahead of need, for all workers of this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tilework.core.actions import ReadComponents
from tilework.core.lora import Lora
from tilework.core.model import ModelSource, Source
from tilework.core.wire.commands import ComponentFiles, ReadWeights, Site
from tilework.core.wire.reports import LoadedModel, Report, WeightsRead
from tilework.runtime.worker_process import WorkerProcess

_NO_DEVICE = -1


@dataclass(slots=True, kw_only=True, eq=False)
class HostReader:
    """Reads components of the models here, one `ReadComponents` at a time; `on_read` gets the answers.

    The process starts with the first read, and again when it has ended. A read that takes longer than `timeout_s` ends
    together with the process.
    """

    directory: Path
    on_read: Callable[[WeightsRead], None]
    timeout_s: float
    _files: dict[str, dict[str, ComponentFiles]] = field(default_factory=dict)  # By model and digest.
    _process: WorkerProcess | None = None
    _read_id: int | None = None
    _timer: asyncio.TimerHandle | None = None

    def know(self, source: Source, model: LoadedModel) -> None:
        """Learn where the components of a model, and of its LoRAs, can be read."""
        if not isinstance(source, ModelSource):
            return
        files = [ComponentFiles(component, source, part=part) for part, component in model.components.items()]
        self._files[model.info.name] = {one.component.digest: one for one in files}
        for one in source.loras:
            if (lora := model.loras.get(one.name)) is not None:
                self.know_lora(model.info.name, source, one.path, lora)

    def know_lora(self, model: str, source: ModelSource, path: str, lora: Lora) -> None:
        """Learn where a LoRA of a model can be read."""
        if lora.component is not None:
            self._files[model][lora.component.digest] = ComponentFiles(lora.component, source, lora=path)

    def forget(self, model: str) -> None:
        self._files.pop(model, None)

    def forget_lora(self, model: str, path: str) -> None:
        """Forget the LoRA of this file, which is no longer one of the model."""
        files = self._files.get(model, {})
        self._files[model] = {digest: one for digest, one in files.items() if one.lora != path}

    def read(self, read: ReadComponents) -> None:
        """Begin a read. Components that no model here has any more cannot be read."""
        files = _found(self._files, read.components)
        if len(files) < len(read.components):
            asyncio.get_running_loop().call_soon(self.on_read, WeightsRead(read.read_id, False))
            return
        if self._process is None:
            site = Site(device_id=_NO_DEVICE, blobs=str(self.directory), reads=True)
            self._process = WorkerProcess(site, [files[0].source], self._on_report, self._on_exit)
        self._read_id = read.read_id
        self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self._process.kill, "it did not read")
        self._process.send(ReadWeights(read.read_id, tuple(files), read.forgets))

    async def close(self, grace_s: float) -> None:
        self._read_id = None
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            await self._process.close(grace_s)

    def _on_report(self, report: Report) -> None:
        if isinstance(report, WeightsRead):
            self._answer(report)

    def _on_exit(self, _reason: str) -> None:
        self._process = None
        if self._read_id is not None:
            self._answer(WeightsRead(self._read_id, False))

    def _answer(self, answer: WeightsRead) -> None:
        if answer.read_id != self._read_id:
            return
        self._read_id = None
        if self._timer is not None:
            self._timer.cancel()
        self.on_read(answer)


def _found(files: Mapping[str, Mapping[str, ComponentFiles]], digests: Iterable[str]) -> list[ComponentFiles]:
    """Return one place for each of these components that a model has."""
    known = {digest: one for of in files.values() for digest, one in of.items()}
    return [known[digest] for digest in digests if digest in known]
