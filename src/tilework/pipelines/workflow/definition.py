"""A workflow as a user writes it: functions of named values, and pipelines of diffusers between them.

Theory of operation. A workflow becomes one graph and one family; all behind these (costs, promises, placement,
checkpoints, replay) knows of no workflow.

1. A function is a stage. Its name is that of its stage, and of the value that it returns. Its parameters are the values
   that it reads: those of other stages, and fields of the request. Edges follow from the names, and so do joins.
2. A pipeline is its family's own stages. What it reads of a request it can read from values instead
   (`Pipeline("shapes", prompt="long_prompt")`): its family gets the request with these put in. Each of its stages reads
   them, so that a request that moves has them on every device.
3. A class is a stage with weights: its modules are components, as those of a pipeline are.
4. `devices` is the kind of device of the stage, `batch` says that requests may share a run. Both are fields that stages
   have anyway.
5. Whatever a user's function raises fails the one request, as an error of a model does, and names the stage.

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
"""The fields of `Spec` that stages may read. Pictures that the request gives have names of their own."""
PICTURE_FIELDS = ("image", "mask_image", "last_image", "control_image", "video")
"""Names of pictures that the first pipeline may take; it says which ones it does."""
_SETTINGS = "tilework_stage"
_KINDS = {"accelerator": DeviceKind.ACCELERATOR, "cpu": DeviceKind.CPU}
_NAME = "a name of letters, digits and _"


class Refused(Exception):
    """Raised by a stage that does not serve a request, such as a safety check: its message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What `stage` says of a function or class."""

    devices: DeviceKind = DeviceKind.ACCELERATOR
    batch: int = 1
    returns: tuple[str, ...] = ()


@overload
def stage(function: T) -> T: ...
@overload
def stage(*, devices: str = ..., batch: int = ..., returns: tuple[str, ...] = ...) -> Callable[[T], T]: ...
def stage(function: Any = None, *, devices: str = "accelerator", batch: int = 1, returns: tuple[str, ...] = ()) -> Any:
    """Say how a function or class runs as a stage of a workflow; what it decorates is returned as it is.

    `devices` is "accelerator", or "cpu" for a stage that needs none: then it runs on a CPU slot. With a `batch` above 1
    it is called for up to this number of requests at once: each argument is a list, and it returns a list with a value
    for each request. A function that returns several values says their names, `returns`, and returns a tuple; the one
    value of others is named like the function.

    Raises:
        InvalidWorkflow: a value cannot be used.
    """
    if devices not in _KINDS:
        raise InvalidWorkflow(f'devices is {devices!r}; choose "accelerator" or "cpu"')
    if type(batch) is not int or batch < 1:
        raise InvalidWorkflow(f"batch is {batch!r}; give a whole number of at least 1")
    if batch > 1 and devices == "cpu":
        raise InvalidWorkflow(
            f'batch is {batch} with devices "cpu", and a CPU slot runs one request at a time; leave one of them out'
        )
    if isinstance(returns, str) or not all(_is_name(one) for one in returns):
        raise InvalidWorkflow(f'returns is {returns!r}; give a tuple of names, ("left", "right")')
    settings = StageSettings(devices=_KINDS[devices], batch=batch, returns=tuple(returns))

    def mark(one: Any) -> Any:
        setattr(one, _SETTINGS, settings)
        return one

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class Function:
    """A user's stage. `make` is the function, or the class, whose objects are called.

    It reads the values `reads`; of these it can do without `optional` ones.
    """

    name: str
    make: Any
    settings: StageSettings
    reads: tuple[str, ...]
    optional: frozenset[str]

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
        return Function(name, made, settings, tuple(one.name for one in parameters), optional)

    @property
    def returns(self) -> tuple[str, ...]:
        """The names of the values that it writes."""
        return self.settings.returns or (self.name,)

    def spec(self, known: frozenset[str], components: tuple[str, ...] = ()) -> StageSpec:
        """The stage in the graph, where `known` values can be read."""
        return StageSpec(
            name=self.name,
            components=components,
            inputs=tuple(one for one in self.reads if one in known or one not in self.optional),
            outputs=self.returns,
            device_kind=self.settings.devices,
            batchable=self.settings.batch > 1,
        )


class Pipeline:
    """A pipeline of diffusers in a workflow, given as a model is given to a server.

    `reads` are fields of its call that values of the workflow are put into, by name: `prompt="long_prompt"`, or
    `image="picture"`. The picture or clip that it makes is the value `returns`. Where a workflow has several pipelines,
    stages of each have its `name` before theirs; it is the end of its path if none is given. `settings` are fields of a
    request that it has always, such as {"steps": 20, "strength": 0.5}. All else the first pipeline takes from the
    request. Others take the size and the seed, and else their own defaults.
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
        self.path, self.adapter, self.returns = path, adapter, returns
        self.name = name or PurePath(path).name.replace("-", "_").replace(".", "_")
        self.settings, self.reads = dict(settings or {}), reads
        for key, value in (("name", self.name), ("returns", returns), *reads.items()):
            if not _is_name(value):
                raise InvalidWorkflow(f"{key} of the pipeline {path!r} is {value!r}; give {_NAME}")
        for key in self.settings:
            if key in reads:
                raise InvalidWorkflow(f"{key} of the pipeline {path!r} is given twice; leave it out of settings")

    def spec(self) -> StageSpec:
        """The pipeline as one stage: what it reads and writes, for a check before it is loaded."""
        return StageSpec(name=self.name, inputs=tuple(self.reads.values()), outputs=(self.returns,))


class Workflow:
    """Stages of a user, and pipelines of diffusers, in any order: see the top of this module.

    Served under its `name`. What its requests may give is what its first pipeline takes. The value that no stage reads
    is the result: a picture, or a clip.

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
        """The values that stages write."""
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
    """The error for a value that no stage writes."""
    names = ", ".join(sorted(known))
    return InvalidWorkflow(f"{field}{stage_name!r} reads {name!r}, which no stage writes; choose one of {names}")


def _written(node: Function | Pipeline) -> Iterator[str]:
    yield from (node.returns,) if isinstance(node, Pipeline) else node.returns


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


assert {one.name for one in fields(Spec)}.issuperset(REQUEST_FIELDS)
