"""A workflow as a user writes it: functions of named values, and pipelines of diffusers between them.

Theory of operation. A workflow becomes one graph and one family; everything after these (costs, promises, placement,
checkpoints, replay) knows of no workflow.

1. A function is a stage. Its name is that of its stage, and of the value that it returns. Its parameters are the values
that it reads: those of other stages, and fields of the request. Edges follow from the names, and so do joins.
2. A pipeline is its family's own stages. It can read from values instead of the request
(`Pipeline("shapes", prompt="long_prompt")`): its family gets the request with these put in. Each of its stages reads
them, so that a request that moves has them on every device.
3. A class is a stage with weights: its modules are components, as those of a pipeline are.
4. `devices` is the kind of device of the stage, `batch` says that requests may share a run, `memory` what a run needs
beyond its weights. Stages have these fields anyway.
5. A collaborative stage is made in a fixed number of parts, whatever its degree: each device of a group makes some of
them, and every device merges all of them. So its value is the same at every degree, bit for bit.
6. An error of a user's function fails the one request, as an error of a model does, and names the stage.

Imports no torch, so that a server can refuse a workflow before it starts workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, TypeVar, overload

from tilework.core.graph.graph import BadGraph, Graph
from tilework.core.graph.stage import DeviceKind, StageSpec
from tilework.core.wire.spec import Spec
from tilework.pipelines.errors import InvalidWorkflow

T = TypeVar("T", bound=Callable[..., Any])
REQUEST_FIELDS = (
    *("prompt", "negative_prompt", "height", "width", "frames"),
    *("steps", "guidance_scale", "seed"),
)
"""Fields of `Spec` that stages may read. Images that the request gives have their own names."""
PICTURE_FIELDS = ("image", "mask_image", "last_image", "control_image", "video")
"""Names of images that the first pipeline may take; it says which ones it does."""
_SETTINGS = "tilework_stage"
PART_FIELDS = ("part", "parts")
"""Parameters that a collaborative stage may also read: the part that it is to make, from 0, and the number of parts."""
_KINDS = {"accelerator": DeviceKind.ACCELERATOR, "cpu": DeviceKind.CPU}
_MODES = ("individual", "collaborative")
_PARTS = 8  # As many as the devices that a node usually has.
_NAME = "a name of letters, digits and _"


class Refused(Exception):
    """Raised by a stage that does not serve a request, such as a safety check: its message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """Settings that `stage` gives a function or class. `parts` is 0 if it is not collaborative."""

    devices: DeviceKind = DeviceKind.ACCELERATOR
    batch: int = 1
    memory_bytes: int = 0
    parts: int = 0
    merge: Callable[[list[Any]], Any] | None = None
    returns: tuple[str, ...] = ()


@overload
def stage(function: T) -> T: ...
@overload
def stage(
    *,
    devices: str = ...,
    batch: int = ...,
    memory: int = ...,
    mode: str = ...,
    parts: int = ...,
    merge: Callable[[list[Any]], Any] | None = ...,
    returns: tuple[str, ...] = ...,
) -> Callable[[T], T]: ...
def stage(
    function: Any = None,
    *,
    devices: str = "accelerator",
    batch: int = 1,
    memory: int = 0,
    mode: str = "individual",
    parts: int = 0,
    merge: Callable[[list[Any]], Any] | None = None,
    returns: tuple[str, ...] = (),
) -> Any:
    """Say how a function or class runs as a stage of a workflow; returns the decorated object unchanged.

    `devices` is "accelerator", or "cpu" for a stage that needs none: then it runs on a CPU slot. With a `batch` above 1
    it is called for up to this number of requests at once: each argument is a list, and it returns a list with a value
    for each request. `memory` is the number of bytes that a call needs on its device beyond its weights. A function
    that returns several values gives their names, `returns`, and returns a tuple; a single value is named like the
    function.

    With the `mode` "collaborative" several devices may work on one request: the function is called once for each of
    `parts` parts, 8 if that is not given, on any of them. It reads which `part` it is to make, and may read `parts`.
    `merge` makes the value from the list of what the parts returned; without it that list is the value.

    Source: OnePiece §4.3, where all workers of a node get a request, and their results are aggregated before they are
    delivered. Unlike there, the parts do not depend on the number of workers, so that results do not either.

    Raises:
        InvalidWorkflow: a value cannot be used.
    """
    if devices not in _KINDS:
        raise InvalidWorkflow(f'devices is {devices!r}; choose "accelerator" or "cpu"')
    for name, number, least in (("batch", batch, 1), ("memory", memory, 0)):
        if type(number) is not int or number < least:
            raise InvalidWorkflow(f"{name} is {number!r}; give a whole number of at least {least}")
    for given, why in ((batch > 1, "runs one request at a time"), (memory, "has memory that is not planned")):
        if given and devices == "cpu":
            what = f"batch is {batch}" if batch > 1 else f"memory is {memory}"
            raise InvalidWorkflow(f'{what} with devices "cpu", and a CPU slot {why}; leave one of them out')
    if isinstance(returns, str) or not all(_is_name(one) for one in returns):
        raise InvalidWorkflow(f'returns is {returns!r}; give a tuple of names, ("left", "right")')
    settings = StageSettings(
        devices=_KINDS[devices],
        batch=batch,
        memory_bytes=memory,
        parts=_num_parts(mode, parts, merge, shared=devices == "cpu" or batch > 1),
        merge=merge,
        returns=tuple(returns),
    )

    def mark(one: Any) -> Any:
        setattr(one, _SETTINGS, settings)
        return one

    return mark if function is None else mark(function)


def _num_parts(mode: str, parts: int, merge: object, *, shared: bool) -> int:
    """Return the number of a stage's parts, 0 if it has none. Raises InvalidWorkflow.

    `shared` is True on a CPU slot, and for a stage that requests share.
    """
    if mode not in _MODES:
        raise InvalidWorkflow(f'mode is {mode!r}; choose "individual" or "collaborative"')
    if mode == "individual":
        if parts or merge is not None:
            raise InvalidWorkflow('parts or merge are given, and mode is "individual"; set mode="collaborative"')
        return 0
    if shared:
        raise InvalidWorkflow(
            'mode is "collaborative", in which accelerators work on one request; leave out batch and devices, or mode'
        )
    if type(parts) is not int or parts < 0 or parts == 1:
        raise InvalidWorkflow(f"parts is {parts!r}; give a whole number of at least 2")
    if merge is not None and not callable(merge):
        raise InvalidWorkflow(f"merge is {merge!r}; give a function of the list of values that the parts return")
    return parts or _PARTS


@dataclass(frozen=True, slots=True)
class Function:
    """A user's stage. `make` is the function, or the class, whose objects are called.

    It reads the values `reads`; it can do without the `optional` ones. `told` are those of `PART_FIELDS` that it reads.
    """

    name: str
    make: Any
    settings: StageSettings
    reads: tuple[str, ...]
    optional: frozenset[str]
    told: tuple[str, ...] = ()

    @staticmethod
    def of(made: Any) -> Function:
        """Read name and signature. Raises InvalidWorkflow."""
        name = getattr(made, "__name__", "")
        if not callable(made) or not _is_name(name):
            raise InvalidWorkflow(
                f"a stage is {made!r}; give a function, a class with __call__, or Pipeline(...), each with {_NAME}"
            )
        is_class = isinstance(made, type)
        parameters = list(inspect.signature(made.__call__ if is_class else made).parameters.values())[is_class:]
        for one in parameters:
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                shown = str(one.replace(annotation=one.empty))
                raise InvalidWorkflow(f"stage {name!r} takes {shown!r}; give each value that it reads a name")
        optional = frozenset(one.name for one in parameters if one.default is not one.empty)
        settings = getattr(made, _SETTINGS, StageSettings())
        names = [one.name for one in parameters]
        told = tuple(one for one in names if settings.parts and one in PART_FIELDS)
        if settings.parts and PART_FIELDS[0] not in told:
            raise InvalidWorkflow(f"stage {name!r} is collaborative and does not read part; give it this parameter")
        return Function(name, made, settings, tuple(one for one in names if one not in told), optional, told)

    @property
    def returns(self) -> tuple[str, ...]:
        """Names of the values that it writes."""
        return self.settings.returns or (self.name,)

    def spec(self, known: frozenset[str], components: tuple[str, ...] = ()) -> StageSpec:
        """Return the stage in the graph, where `known` values can be read."""
        return StageSpec(
            name=self.name,
            components=components,
            inputs=tuple(one for one in self.reads if one in known or one not in self.optional),
            outputs=self.returns,
            degrees=None if self.settings.parts else (1,),
            memory_bytes=self.settings.memory_bytes,
            device_kind=self.settings.devices,
            batchable=self.settings.batch > 1,
        )


class Pipeline:
    """A pipeline of diffusers in a workflow, given as a model is given to a server.

    `reads` are fields of its call that values of the workflow are put into, by name: `prompt="long_prompt"`, or
    `image="picture"`. The image or clip that it makes is the value `returns`. If a workflow has several pipelines, the
    stages of each have its `name` before theirs; the default is the end of its path. `settings` are fields of a request
    that are always set, such as {"steps": 20, "strength": 0.5}. The first pipeline takes everything else from the
    request. Others take the size and the seed, and otherwise their own defaults.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str = "",
        adapter: str | None = None,
        returns: str = "picture",
        settings: Mapping[str, Any] | None = None,
        **reads: str,
    ) -> None:
        self.path = path
        self.adapter = adapter
        self.returns = returns
        self.name = name or PurePath(path).name.replace("-", "_").replace(".", "_")
        self.settings = dict(settings or {})
        self.reads = reads
        for key, value in (("name", self.name), ("returns", returns), *reads.items()):
            if not _is_name(value):
                raise InvalidWorkflow(f"{key} of the pipeline {path!r} is {value!r}; give {_NAME}")
        for key in self.settings:
            if key in reads:
                raise InvalidWorkflow(f"{key} of the pipeline {path!r} is given twice; leave it out of settings")

    def spec(self) -> StageSpec:
        """Return the pipeline as one stage: what it reads and writes, for a check before it is loaded."""
        return StageSpec(name=self.name, inputs=tuple(self.reads.values()), outputs=(self.returns,))


class Workflow:
    """Stages of a user, and pipelines of diffusers, in any order: see the top of this module.

    Served under its `name`. Its requests may give what its first pipeline takes. The value that no stage reads is the
    result: an image, or a clip.

    Raises:
        InvalidWorkflow: the stages do not fit together.
    """

    def __init__(self, name: str, *stages: Any) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidWorkflow(f"the name of a workflow is {name!r}; give a text that is not empty")
        self.name = name
        self.nodes = tuple(one if isinstance(one, Pipeline) else Function.of(one) for one in stages)
        if not self.pipelines:
            raise InvalidWorkflow(f'{name} has no pipeline; give it one, Pipeline("shapes")')
        self._check()

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        return tuple(one for one in self.nodes if isinstance(one, Pipeline))

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(one for one in self.nodes if isinstance(one, Function))

    @property
    def written(self) -> frozenset[str]:
        """Values that stages write."""
        return frozenset(name for one in self.nodes for name in _written(one))

    def _check(self) -> None:
        """Raise InvalidWorkflow for names that do not fit, and for a graph that cannot be run."""
        for one in self.nodes:
            for name in _written(one):
                if name in (*REQUEST_FIELDS, *PICTURE_FIELDS):
                    raise InvalidWorkflow(
                        f"{one.name!r} writes {name!r}, which comes with the request; give the value another name, and "
                        f'let a pipeline read it, Pipeline(..., {name}="NAME")'
                    )
        known = self.written.union(REQUEST_FIELDS, PICTURE_FIELDS)
        for function in self.functions:
            for name in function.reads:
                if name not in known and name not in function.optional:
                    raise unknown_value(function.name, name, known)
        for pipeline in self.pipelines:
            for field, name in pipeline.reads.items():
                if name not in known:
                    raise unknown_value(pipeline.name, name, known, f"{field} of ")
        specs = tuple(one.spec(known) if isinstance(one, Function) else one.spec() for one in self.nodes)
        try:
            Graph(self.name, specs)
        except BadGraph as error:
            raise InvalidWorkflow(f"{self.name}: {error}") from None


def unknown_value(stage_name: str, name: str, known: frozenset[str], field: str = "") -> InvalidWorkflow:
    """Return the error for a value that no stage writes."""
    names = ", ".join(sorted(known))
    return InvalidWorkflow(f"{field}{stage_name!r} reads {name!r}, which no stage writes; choose one of {names}")


def _written(node: Function | Pipeline) -> Iterator[str]:
    yield from (node.returns,) if isinstance(node, Pipeline) else node.returns


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


assert {one.name for one in fields(Spec)}.issuperset(REQUEST_FIELDS)
