"""A model on a CPU slot that only writes its videos: no component of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from tilework.core.comm import Comm
from tilework.core.graph.stage import DeviceKind, ResultKind
from tilework.core.model import ModelInfo
from tilework.core.packing import Pack
from tilework.core.wire.spec import File, Image, Spec
from tilework.pipelines.family import Values, Watch
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.video.export import EXPORT, EXPORT_WITH_SOUND, exported, exported_file
from tilework.pipelines.video.pyav import pyav


class Exporter:
    """A `Family` of the stage `export.EXPORT` alone. See `family.Family` for the contract."""

    loras = None
    modules: Mapping[str, torch.nn.Module] = {}
    device = torch.device("cpu")

    def __init__(self, info: ModelInfo) -> None:
        assert can_export(info)
        self.info = info
        self.parallel = Parallel()

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        assert stage == EXPORT.name
        return [exported(spec, one) for spec, one in zip(specs, values, strict=True)]

    def file(self, spec: Spec, values: Values) -> File:
        return exported_file(values)

    def join(self, comm: Comm, spec: Spec) -> NoReturn:
        raise _no_steps()

    def begin(self, stage: str, spec: Spec, values: Values) -> NoReturn:
        raise _no_steps()

    def step(self, states: Sequence[Any], pack: Pack | None = None, watch: Watch | None = None) -> NoReturn:
        raise _no_steps()

    def finish(self, state: Any) -> NoReturn:
        raise _no_steps()

    def image(self, spec: Spec, values: Values) -> Image:
        raise _no_steps()

    def export(self, state: Any) -> NoReturn:
        raise _no_steps()

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> NoReturn:
        raise _no_steps()


def can_export(info: ModelInfo) -> bool:
    """Return whether the stages of a model that run on CPU slots need nothing of it."""
    return all(stage.spec in (EXPORT, EXPORT_WITH_SOUND) for stage in info.graph.stages if stage.kind is DeviceKind.CPU)


def check_export(info: ModelInfo) -> None:
    """Refuse a model that makes videos when it is loaded, not after a clip has been computed.

    Raises:
        LibraryMissing: PyAV is not installed.
    """
    if any(stage.spec.result is ResultKind.VIDEO for stage in info.graph.stages):
        pyav()


def _no_steps() -> RuntimeError:
    return RuntimeError("a CPU slot that writes videos runs no other stage")
