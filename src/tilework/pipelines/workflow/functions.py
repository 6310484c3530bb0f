"""The user's stages in a process: functions, objects of classes, and the weights of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilework.core.comm import Comm
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Refusal
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import InvalidWorkflow, RequestRefused, UnsupportedModel
from tilework.pipelines.family import Values
from tilework.pipelines.workflow.definition import PART_FIELDS, REQUEST_FIELDS, Function, Refused
from tilework.pipelines.workflow.exchange import from_all
from tilework.pipelines.workflow.pictures import for_user, from_user, is_picture, tensor_of


class StageFailed(Exception):
    """A user's stage raised an error, or returned an invalid value; the message names the stage."""


class StageRefused(RequestRefused):
    """A user's stage does not serve a request; the message has the stage and the reason."""

    refusal = Refusal.CONTENT


@dataclass(frozen=True, slots=True, eq=False)
class LoadedFunction:
    """A function that can be called, with the modules that it has, by the names of the graph's components.

    `device` is that of its worker.
    """

    function: Function
    call: Any
    modules: Mapping[str, nn.Module]
    device: torch.device

    @staticmethod
    def of(
        function: Function, device: torch.device, place: Callable[[nn.Module], object] | None = None
    ) -> LoadedFunction:
        """Make the object of a class; its modules are on the `device`, or on the CPU if its stage is.

        Before they go to the device, `place` may put their weights elsewhere.

        Raises:
            InvalidWorkflow: the class cannot be made without arguments, or raises an error.
        """
        if not isinstance(function.make, type):
            return LoadedFunction(function, function.make, {}, device)
        try:
            call = function.make()
        except Exception as error:
            raise InvalidWorkflow(
                f"stage {function.name!r} cannot be made ({type(error).__name__}: {error}); its class is called "
                "without arguments, and loads its weights then"
            ) from error
        modules = modules_within(function.name, call)
        is_of_slots = function.settings.devices is DeviceKind.CPU
        for module in modules.values():
            if place is not None and not is_of_slots:
                place(module)
            module.to("cpu" if is_of_slots else device).eval()
        return LoadedFunction(function, call, modules, device)

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the stage. Those of a CPU slot are always there, so they are left out."""
        return () if self.function.settings.devices is DeviceKind.CPU else tuple(self.modules)

    @torch.no_grad()
    def run(self, specs: Sequence[Spec], values: Sequence[Values], comm: Comm | None = None) -> list[Values]:
        """Return the outputs for each request. Members of a group (`comm`) share the parts of a collaborative stage.

        Raises:
            StageRefused: the function has refused one.
            StageFailed: it raises another error.
            GroupBroken: a member of the group is lost.
        """
        given = [self._arguments(spec, one) for spec, one in zip(specs, values, strict=True)]
        if self.function.settings.parts:
            return [self._merged(one, comm) for one in given]
        size = self.function.settings.batch
        with self._named_errors():
            if size == 1:
                return [self._named(self.call(**one)) for one in given]
            batches = [given[start : start + size] for start in range(0, len(given), size)]
            return [self._named(one) for batch in batches for one in self._call_batch(batch)]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn errors of the user's code into StageRefused or StageFailed."""
        name = self.function.name
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError, StageFailed):
            raise  # A worker without memory tries again with less.
        except Refused as error:
            raise StageRefused(f"stage {name!r} has refused it: {error}") from error
        except Exception as error:
            raise StageFailed(f"stage {name!r} raises {type(error).__name__}: {error}") from error

    def _merged(self, given: Mapping[str, Any], comm: Comm | None) -> Values:
        """Return the outputs of a collaborative stage. If the code of one member raises, all raise its error."""
        own = self._own_parts(given, *((0, 1) if comm is None else (comm.rank, comm.size)))
        of_all = [own] if comm is None else from_all(comm, own, self.device)
        for one in of_all:
            if one["refused"]:
                raise StageRefused(one["refused"])
            if one["failed"]:
                raise StageFailed(one["failed"])
        made = {part: value for one in of_all for part, value in one["made"]}
        parts = [for_user(made[part]) for part in range(self.function.settings.parts)]
        merge = self.function.settings.merge
        with self._named_errors():
            return self._named(parts if merge is None else merge(parts))

    def _own_parts(self, given: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        """Return the results of this member of a group, by part, and the error that its code has raised."""
        num_parts = self.function.settings.parts
        found: dict[str, Any] = {"made": [], "refused": "", "failed": ""}
        try:
            with self._named_errors():
                for part in range(rank, num_parts, size):
                    fields = dict(zip(PART_FIELDS, (part, num_parts), strict=True))
                    told = {name: fields[name] for name in self.function.told}
                    found["made"].append([part, from_user(self.call(**given, **told))])
        except StageRefused as error:
            found["refused"] = str(error)
        except StageFailed as error:
            found["failed"] = str(error)
        return found

    def _call_batch(self, given: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        returned = self.call(**{name: [one[name] for one in given] for name in given[0]})
        if not isinstance(returned, list) or len(returned) != len(given):
            raise StageFailed(
                f"stage {self.function.name!r} returns {_shown(returned)} for {len(given)} requests; return a list of "
                "one value for each"
            )
        return returned

    def _arguments(self, spec: Spec, values: Values) -> Mapping[str, Any]:
        """Return the function's arguments from values and the request. Optional ones may be missing."""
        found = {name: for_user(values[name]) for name in self.function.reads if name in values}
        asked = {name: getattr(spec, name) for name in self.function.reads if name in REQUEST_FIELDS}
        pictures = {
            name: [for_user(tensor_of(one)) for one in images]
            for name, images in spec.pictures.items()
            if name in self.function.reads
        }
        return asked | {name: some if len(some) > 1 else some[0] for name, some in pictures.items()} | found

    def _named(self, returned: Any) -> Values:
        names = self.function.returns
        if len(names) == 1 and not self.function.settings.returns:
            return {names[0]: from_user(returned)}
        if not isinstance(returned, tuple) or len(returned) != len(names):
            raise StageFailed(
                f"stage {self.function.name!r} returns {_shown(returned)}; return a tuple of {', '.join(names)}"
            )
        return {name: from_user(value) for name, value in zip(names, returned, strict=True)}


def modules_within(name: str, owner: object) -> dict[str, nn.Module]:
    """Return the modules of an object of a stage: itself, or its attributes."""
    if isinstance(owner, nn.Module):
        return {name: owner}
    return {f"{name}.{key}": one for key, one in vars(owner).items() if isinstance(one, nn.Module)}


def require_picture(name: str, value: object) -> None:
    """Raise UnsupportedModel if a value, which is a result, is no image or clip."""
    if not is_picture(value):
        raise UnsupportedModel(
            f"the result {name!r} is {_shown(value)}; the last stage returns an image, or a list of images"
        )


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
