"""Models that all nodes serve, and how they change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from itertools import combinations

from tilework.core.lora import Lora
from tilework.core.model import LoraSource, ModelInfo, ModelSource, Source
from tilework.core.wire.commands import RemoveLora, RemoveModel
from tilework.core.wire.content import first_difference
from tilework.core.wire.reports import LoadedModel, NotLoaded
from tilework.cost.profile import ProfileKey
from tilework.runtime.executor import ModelRefused, WorkerStartFailed, none_loaded
from tilework.runtime.nodes.messages import Changed, LoraRead, ModelRead, ReadLora, ReadModel, ServeModel, Started
from tilework.runtime.nodes.remote_node import Answer, RemoteNode


class NodeModels:
    """The models and LoRAs of all nodes; `nodes` are the current ones, by their place.

    `sources` are those that a node is started with. All nodes have the same models. A change is made on all nodes or on
    none; a node that is lost meanwhile does not count, and one that has started meanwhile is sent away, to start again.
    """

    def __init__(self, sources: tuple[Source, ...], nodes: Mapping[int, RemoteNode]) -> None:
        self.sources = sources
        self._given_names: dict[str, str] = {}  # Name of a model before the first node had read it.
        self.keys: dict[str, ProfileKey] = {}
        self.version = 0  # Number of changes of `sources`.
        self.not_loaded: tuple[NotLoaded, ...] = ()
        self._infos: dict[str, ModelInfo] = {}
        self._places = tuple(range(len(sources)))  # Of the sources, among those of the start.
        self._nodes = nodes
        self._is_changing = False

    def leave_out(self, node: int, not_loaded: Sequence[NotLoaded]) -> None:
        """Leave models that this node could not load out on all nodes, while the server starts.

        Nodes that have these models forget them, and those that are starting must start again.
        """
        left = {one.place: one for one in not_loaded}
        for place, one in left.items():
            source = self.sources[place]
            name = source.name if isinstance(source, ModelSource) and source.name else one.name
            left_out = NotLoaded(self._places[place], name, f"on node {node}: {one.reason}")
            self.not_loaded = (*self.not_loaded, left_out)
            self.keys.pop(name, None)
            self._infos.pop(name, None)
            for other in [each for each in self._nodes.values() if each.started is not None]:
                other.tell(RemoveModel(name))
        self._places = tuple(one for place, one in enumerate(self._places) if place not in left)
        self._change(tuple(one for place, one in enumerate(self.sources) if place not in left))

    def take(self, first: Started) -> None:
        """Take the names of the models from the first node that is up."""
        models = [one.info for one in first.models]
        self.keys = dict(first.keys)
        self._infos = {info.name: info for info in models}
        self._given_names = {
            info.name: source.name
            for source, info in zip(self.sources, models, strict=True)
            if isinstance(source, ModelSource)
        }
        self.sources = tuple(
            replace(source, name=info.name) if isinstance(source, ModelSource) else source
            for source, info in zip(self.sources, models, strict=True)
        )

    @property
    def serving(self) -> Mapping[str, tuple[int, ...]]:
        """Devices of each model that not all serve, by its name, once that is known."""
        return {
            one.name: one.devices for one in self.sources if isinstance(one, ModelSource) and one.devices is not None
        }

    @property
    def to_begin(self) -> tuple[Source, ...]:
        """Sources for a node's start: the same before and after the models' names are known."""
        return tuple(
            replace(one, name=self._given_names.get(one.name, one.name)) if isinstance(one, ModelSource) else one
            for one in self.sources
        )

    def difference(self, other: Started) -> str | None:
        """Return what another node has instead of what the first has; None if they are alike."""
        ours = {name: _whole(self.keys[name]) for name in other.keys if name in self.keys}
        if ours != {name: _whole(key) for name, key in other.keys.items()}:
            return f"has {_described(other.keys)}, not {_described(self.keys)}"
        if other.not_loaded:
            return f"cannot load a model ({none_loaded(other.not_loaded)})"
        for theirs in (one.info for one in other.models):
            first = self._infos[theirs.name]
            if (field := _other_field(theirs, first)) is not None:
                what = getattr(theirs, field), getattr(first, field)
                return f"has another model {theirs.name}: its {field} is {what[0]!r:.200}, not {what[1]!r:.200}"
        return None

    def content_difference(self, node: RemoteNode) -> str | None:
        """Return a file that differs between a node and another one, in words; None if all known files may be equal.

        Only files of served models are compared; before the first node is up, files of all models.
        """
        others = [one for one in self._nodes.values() if one is not node and one.leave is None]
        found = (_content_difference(node, other, self._infos or node.contents) for other in others)
        return next((one for one in found if one is not None), None)

    def is_outdated(self, version: int) -> bool:
        """Return whether a node that was started with the sources of this version must start again."""
        return self._is_changing or version != self.version

    async def read(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        """Read a further model on all nodes. Raises ModelRefused."""
        self._is_changing = True
        answers = await self._ask(ReadModel(source, tuple(sorted(served))), ModelRead)
        found = [(one.model, one.key) for one in answers if one.model is not None and one.key is not None]
        error = _error(answers)
        if not error and found:
            error = self._read_difference(found[0][0].info.name)
        if not error and any(_runs(*one) != _runs(*found[0]) for one in found):
            error = f"{source.path} is another model, or runs otherwise, on one of the nodes; all must have the same"
        if error:
            self._is_changing = False
            for name in sorted({model.info.name for model, _ in found}):
                self._tell(RemoveModel(name))
            raise ModelRefused(error)
        model, key = found[0]
        self.keys[model.info.name] = key
        self._infos[model.info.name] = model.info
        return model

    def _read_difference(self, model: str) -> str:
        """Return which file of a model that is not served yet differs, and on which nodes; empty if none does."""
        for first, second in combinations(self._nodes.values(), 2):
            if (differs := _content_difference(second, first, (model,))) is not None:
                return f"node {second.node} {differs}; all must have the same"
        return ""

    async def add(self, source: ModelSource) -> None:
        """Let all nodes serve a model that was read. Raises ModelRefused."""
        error = _error(await self._ask(ServeModel(source), Changed))
        if error:
            raise ModelRefused(error)
        self._change((*self.sources, source))

    def remove(self, model: str) -> None:
        """Let no node serve a model, and forget it if it was only read."""
        self.keys.pop(model, None)
        self._infos.pop(model, None)
        self._tell(RemoveModel(model))
        self._change(tuple(one for one in self.sources if not isinstance(one, ModelSource) or one.name != model))

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        """Let requests for a model use another LoRA on all nodes. Raises ModelRefused."""
        self._is_changing = True
        answers = await self._ask(ReadLora(model, lora), LoraRead)
        found = [one.lora for one in answers if one.lora is not None]
        error = _error(answers)
        if not error and any(one != found[0] for one in found):
            error = f"{lora.path} is another file on one of the nodes; all must have the same"
        if error:
            self._tell(RemoveLora(model, lora.name))
            self._is_changing = False
            raise ModelRefused(error)
        self._change_loras(model, lambda loras: (*loras, lora))
        return found[0]

    def remove_lora(self, model: str, name: str) -> None:
        """Stop letting requests for a model use a LoRA."""
        self._tell(RemoveLora(model, name))
        self._change_loras(model, lambda loras: tuple(one for one in loras if one.name != name))

    def _change_loras(self, model: str, change: Callable[[tuple[LoraSource, ...]], tuple[LoraSource, ...]]) -> None:
        self._change(
            tuple(
                replace(one, loras=change(one.loras)) if isinstance(one, ModelSource) and one.name == model else one
                for one in self.sources
            )
        )

    def _change(self, sources: tuple[Source, ...]) -> None:
        self.version += sources != self.sources
        self.sources = sources
        self._is_changing = False

    def _tell(self, message: object) -> None:
        for node in self._nodes.values():
            node.tell(message)

    async def _ask(self, message: object, kind: type[Answer]) -> list[Answer]:
        """Return the answers of all nodes but those that are lost meanwhile. Raises ModelRefused if there is none."""
        asked = [node.ask(message, kind) for node in self._nodes.values() if node.started is not None]
        answers: list[Answer] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, WorkerStartFailed):
                continue
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        if not answers:
            self._is_changing = False
            raise ModelRefused("all nodes were lost")
        return answers


def _error(answers: Sequence[ModelRead | Changed | LoraRead]) -> str:
    return next((one.error for one in answers if one.error), "")


def _runs(model: LoadedModel, key: ProfileKey) -> tuple[ModelInfo, tuple[object, ...]]:
    return _plain(model.info), _whole(key)


def _whole(key: ProfileKey) -> tuple[object, ...]:
    """Return the fields of a key, with the content of the model: equal keys may be of models with other weights."""
    return astuple(replace(key, model=key.content))


def _content_difference(node: RemoteNode, other: RemoteNode, models: Iterable[str]) -> str | None:
    """Return the first file of these models that differs between two nodes, in words; None if all may be equal."""
    for name in sorted({*models} & node.contents.keys() & other.contents.keys()):
        differs = first_difference(node.contents[name], other.contents[name], f"node {other.node}")
        if differs is not None:
            return f"has another model {name}: {differs}; copy the model from one to the other"
    return None


def _plain(info: ModelInfo) -> ModelInfo:
    """Return the info without the LoRAs that a node has, which may have come or gone, and the model's path there."""
    return replace(info, loras=(), path="")


def _other_field(one: ModelInfo, other: ModelInfo) -> str | None:
    """Return the first field in which models differ; None if they are alike."""
    pair = _plain(one), _plain(other)
    names = (field.name for field in fields(ModelInfo))
    return next((name for name in names if getattr(pair[0], name) != getattr(pair[1], name)), None)


def _described(keys: Mapping[str, ProfileKey]) -> str:
    return "; ".join(f"{name} ({key.model}) on {key.hardware}" for name, key in keys.items())
