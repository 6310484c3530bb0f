"""A pipeline as a graph of stages. Progress, costs, works, states and reports follow it; only adapters name stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tilework.core.cache import CacheChoice
from tilework.core.graph.itinerary import Itinerary
from tilework.core.graph.stage import DeviceKind, ResultKind, Stage, StageSpec, StepShare
from tilework.core.lora import UsedLora

_MAX_CACHED = 1024
_NONE: Mapping[UsedLora, frozenset[str]] = {}


class BadGraph(ValueError):
    """A description of a graph that cannot be used; the message names the stage, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The stages of a pipeline as a directed acyclic graph: a stage comes after those that write its inputs.

    `specs` are in any order. `stages` are in an order in which they can run, that of `specs` where the graph leaves a
    choice; `stepped` are those of them that have steps. The outputs of the last stage on a request's way are its
    result.

    One latent frame holds `frames_per_latent` frames of a clip, except for the first, which holds one: 4 for Wan, so
    that 81 frames are 21 in latent space. Times and bytes of a stage follow the latents.

    Raises:
        BadGraph: a name is used twice, inputs form a cycle, or it is unclear which stage comes last.
    """

    pipeline: str
    specs: tuple[StageSpec, ...]
    frames_per_latent: int = 1
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    stepped: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    _itineraries: dict[tuple[object, ...], Itinerary] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        _check(self.specs)
        object.__setattr__(self, "stages", tuple(Stage(self.pipeline, spec.name, spec) for spec in _sorted(self.specs)))
        object.__setattr__(self, "stepped", tuple(stage for stage in self.stages if stage.has_steps))

    @property
    def needs_slots(self) -> bool:
        """True if a stage runs on CPU slots."""
        return any(stage.kind is DeviceKind.CPU for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Return the stage of this name. Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def makes(self, result: ResultKind) -> bool:
        """Return whether its requests may ask for this kind of result."""
        return result is ResultKind.PIXELS or any(stage.spec.result is result for stage in self.stages)

    def itinerary(
        self,
        steps: int,
        loras: Mapping[UsedLora, frozenset[str]] = _NONE,
        result: ResultKind = ResultKind.PIXELS,
        cache: CacheChoice | None = None,
    ) -> Itinerary:
        """Return the way of a request of this number of steps: the same object every time, as long as it is cached.

        `loras` are those that the request uses, each with the components that it changes. Stages that make another kind
        of result than `result` are not on the way. Stages with steps use the `cache`.
        """
        # Tables share graphs, and one name may change other components in each.
        key = steps, result, cache, *loras.items()
        known = self._itineraries.get(key)
        if known is None:
            if len(self._itineraries) >= _MAX_CACHED:  # Clients choose the steps, and the scales of LoRAs.
                self._itineraries.clear()
            stages = [stage for stage in self.stages if stage.spec.result in (None, result)]
            stages = [_with_loras(stage, loras) for stage in stages] if loras else stages
            stages = [one.with_cache(cache) if one.has_steps else one for one in stages] if cache else stages
            parts = [(stage, 1 if stage.spec.steps is None else stage.spec.steps.of(steps)) for stage in stages]
            known = self._itineraries[key] = Itinerary(parts)
        return known

    def renamed(self, pipeline: str) -> Graph:
        """Return the same graph for another pipeline."""
        return Graph(pipeline, self.specs, self.frames_per_latent)

    def to_json(self) -> list[dict[str, Any]] | dict[str, Any]:
        """Return what `parse` reads, without fields that have their default: the list of stages if that is all."""
        stages = [_spec_json(spec) for spec in self.specs]
        return (
            stages if self.frames_per_latent == 1 else {"stages": stages, "frames_per_latent": self.frames_per_latent}
        )

    @classmethod
    def parse(cls, pipeline: str, document: object) -> Graph:
        """Read what `to_json` returns. Raises BadGraph."""
        stages, frames = document, 1
        if isinstance(document, Mapping) and document.keys() <= {"stages", "frames_per_latent"}:
            stages, frames = document.get("stages"), document.get("frames_per_latent", 1)
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise BadGraph(
                f"the graph of {pipeline!r} is {document!r}; expected a list of stages, or an object with stages and "
                "frames_per_latent"
            )
        if type(frames) is not int or frames < 1:
            raise BadGraph(f"frames_per_latent of {pipeline!r} is {frames!r}; expected a whole number of at least 1")
        return cls(pipeline, tuple(_parse_spec(one) for one in stages), frames)


def _with_loras(stage: Stage, loras: Mapping[UsedLora, frozenset[str]]) -> Stage:
    """Return the stage with those of the LoRAs that change one of its components.

    Requests can share it only if they have one size: LoRAs of convolutions cannot handle packed batches.
    """
    components = set(stage.spec.components)
    used = tuple(one for one, changes in loras.items() if not components.isdisjoint(changes))
    return replace(stage, spec=replace(stage.spec, one_shape=True), loras=used) if used else stage


def _check(specs: Sequence[StageSpec]) -> None:
    """Raise BadGraph for values out of range, names that are used twice, and previews by an unknown stage."""
    names = [spec.name for spec in specs]
    for what, used in (("stage", names), ("output", [name for spec in specs for name in spec.outputs])):
        twice = {name for name in used if used.count(name) > 1}
        if twice:
            raise BadGraph(f"the {what} {min(twice)!r} comes twice; rename one")
    for spec in specs:
        if spec.previews and spec.previews not in names:
            raise BadGraph(
                f"previews of {spec.name!r} is {spec.previews!r}, which is no stage; name one, or leave it out"
            )
        if spec.degrees is not None and (not spec.degrees or min(spec.degrees) < 1):
            raise BadGraph(f"degrees of {spec.name!r} is {spec.degrees!r}; expected numbers of at least 1, or null")
        if type(spec.memory_bytes) is not int or spec.memory_bytes < 0:
            raise BadGraph(f"memory_bytes of {spec.name!r} is {spec.memory_bytes!r}; expected a number of bytes, or 0")
        needs = spec.steps is not None or spec.degrees != (1,) or spec.batchable or spec.memory_bytes
        if spec.device_kind is DeviceKind.CPU and needs:
            raise BadGraph(
                f"device_kind of {spec.name!r} is 'cpu', and a CPU slot runs a stage at once, alone, for one request, "
                "in memory that is not planned; leave out steps, degrees, batchable and memory_bytes, or device_kind"
            )
    _check_results(specs)


def _check_results(specs: Sequence[StageSpec]) -> None:
    """Raise BadGraph for a stage that reads an output which only requests for another kind of result have."""
    made_for = {output: spec.result for spec in specs for output in spec.outputs if spec.result is not None}
    for spec in specs:
        for name in spec.inputs:
            if made_for.get(name, spec.result) is not spec.result:
                raise BadGraph(
                    f"{spec.name!r} reads {name!r}, which only requests for a {made_for[name].value} have; give it the"
                    " same result, or leave out that of the stage before it"
                )


def _sorted(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """Return the stages in an order in which they can run. Raises BadGraph."""
    written = {name for spec in specs for name in spec.outputs}
    ready: set[str] = set()
    left = list(specs)
    found: list[StageSpec] = []
    while left:
        runnable = next((spec for spec in left if written.intersection(spec.inputs) <= ready), None)
        if runnable is None:
            raise BadGraph(
                f"the inputs of {', '.join(spec.name for spec in left)} wait for each other; break the cycle"
            )
        left.remove(runnable)
        found.append(runnable)
        ready.update(runnable.outputs)
    read = {name for spec in specs for name in spec.inputs}
    last = [spec.name for spec in found if read.isdisjoint(spec.outputs)]
    if last != [found[-1].name] if found else True:
        raise BadGraph(
            f"no other stage reads the outputs of {', '.join(last) or 'any'}; expected one such stage, the last"
        )
    return found


_DEFAULTS = StageSpec(name="")


def _spec_json(spec: StageSpec) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for column in fields(StageSpec):
        value = getattr(spec, column.name)
        if value == getattr(_DEFAULTS, column.name):
            continue
        if isinstance(value, StepShare):
            value = {"count": value.count} if value.count is not None else {"first": value.first, "last": value.last}
        document[column.name] = list(value) if isinstance(value, tuple) else value
    return document


def _parse_spec(document: object) -> StageSpec:
    if not isinstance(document, Mapping) or not isinstance(document.get("name"), str) or not document["name"]:
        raise BadGraph(f"a stage is {document!r}; expected an object with a name")
    values: dict[str, Any] = dict(document)
    place = f"stage {values['name']!r}"
    unknown = sorted(values.keys() - {column.name for column in fields(StageSpec)})
    if unknown:
        raise BadGraph(f"{place}: {unknown[0]} is not a field; leave it out")
    for key in ("components", "inputs", "outputs"):
        values[key] = _texts(f"{place}: {key}", values.get(key, ()))
    degrees = values.get("degrees", _DEFAULTS.degrees)
    if degrees is not None:
        if not isinstance(degrees, Sequence) or not all(type(one) is int for one in degrees):
            raise BadGraph(f"{place}: degrees is {degrees!r}; expected a list of whole numbers, or null")
        values["degrees"] = tuple(degrees)
    for key in ("batchable", "one_shape", "sliceable"):
        if type(values.get(key, False)) is not bool:
            raise BadGraph(f"{place}: {key} is {values[key]!r}; expected true or false")
    kinds, kind = [one.value for one in DeviceKind], values.get("device_kind", _DEFAULTS.device_kind.value)
    if kind not in kinds:
        raise BadGraph(f"{place}: device_kind is {kind!r}; expected {' or '.join(map(repr, kinds))}")
    values["device_kind"] = DeviceKind(kind)
    results, result = [one.value for one in ResultKind], values.get("result")
    if result is not None and result not in results:
        raise BadGraph(f"{place}: result is {result!r}; expected {' or '.join(map(repr, results))}, or null")
    values["result"] = None if result is None else ResultKind(result)
    if values.get("steps") is not None:
        values["steps"] = _parse_steps(f"{place}: steps", values["steps"])
    return StageSpec(**values)


def _texts(place: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise BadGraph(f"{place} is {value!r}; expected a list of names")
    return tuple(value)


def _parse_steps(place: str, document: object) -> StepShare:
    try:
        share = StepShare(**document)  # type: ignore[arg-type]
    except TypeError:
        share = None
    if share is None or not _is_share(share):
        raise BadGraph(f'{place} is {document!r}; expected {{"first": 0, "last": 1}} or {{"count": 4}}')
    return share


def _is_share(share: StepShare) -> bool:
    if share.count is not None:
        return type(share.count) is int and share.count >= 1
    numbers = all(type(value) in (int, float) for value in (share.first, share.last))
    return numbers and 0 <= share.first < share.last <= 1
