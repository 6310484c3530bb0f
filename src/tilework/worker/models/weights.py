"""The weights of a worker's components: which are on its device, and from where the others can be loaded.

Weights that are not on the device lie in files that the workers of a node share (`shared_weights`), as long as there
is room, and in the directory of their model. A module without its weights keeps their types.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from tilework.core.component import Component
from tilework.pipelines.components import weights_of
from tilework.pipelines.cuda.copies import Sending
from tilework.worker.models.cell import Cell, SplitModule, component_in
from tilework.worker.models.shared_weights import Form, SharedWeights, WeightsFile, digest_of

_POLL_S = 0.002  # Pause between two checks whether another process has read a component.

Read = Callable[[], nn.Module]
"""Reads a component from the directory of its model."""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Component of a module, and the forms of its weights, without their memory."""

    component: Component
    forms: tuple[Form, ...]

    @staticmethod
    def of(module: nn.Module) -> KeptWeights:
        """Hash a module's weights. Components are equal if class, configuration and weights are."""
        weights = weights_of(module)
        forms = tuple(Form.of(one) for one in weights)
        content = digest_of(weights)
        digest = sha256(f"{type(module).__name__} {_configuration(module)} {content}".encode()).hexdigest()[:16]
        return KeptWeights(Component(digest, sum(form.num_bytes for form in forms)), forms)

    def on(self, device: torch.device) -> KeptWeights:
        """Return the same for weights that are to lie on another device."""
        return replace(self, forms=tuple(replace(form, device=device) for form in self.forms))


@dataclass(frozen=True, slots=True, eq=False)
class _Module:
    """The weights of a module of one model, their forms, the function that reads them, and their layout in a cell."""

    weights: Sequence[Tensor]
    forms: Sequence[Form]
    read: Read
    split: SplitModule | None


@dataclass(slots=True, eq=False)
class _Known:
    """A component, and the modules that have it: one of each model with this component.

    In a cell `pieces` are this device's pieces of its blocks. `sending` is set while the first module's weights arrive.
    """

    component: Component
    modules: list[_Module] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    sending: Sending | None = None
    is_here: bool = False


class Weights:
    """The components of a worker by digest. Equal ones of several models lie on the device once.

    A device of a `cell` has its part of each.
    """

    def __init__(self, files: SharedWeights, cell: Cell | None = None) -> None:
        self._files = files
        self.cell = cell
        self._known: dict[str, _Known] = {}

    def add(self, module: nn.Module, read: Read) -> Component:
        """Take over the weights of a module, which lie on the device; the module is left without them.

        Components are equal if class, configuration and weights are, wherever they come from.
        """
        kept = KeptWeights.of(module)
        if kept.component.digest not in self._known:
            self.keep(kept, weights_of(module))
        self.add_empty(module, kept, read)
        return kept.component

    def leave_on_host(self, module: nn.Module, device: torch.device) -> KeptWeights:
        """Keep on the host the weights of a module that was just read.

        On the `device` they have only their shapes, until `add_empty` takes the module over.
        """
        kept = KeptWeights.of(module).on(device)
        weights = weights_of(module)
        if kept.component.digest not in self._known:
            self.keep(kept, weights)
        for weight, form in zip(weights, kept.forms, strict=True):
            weight.data = form.shaped()
        return kept

    def load_to_stay(self, module: nn.Module, kept: KeptWeights) -> None:
        """Bring the weights of a module that was left on the host to its device, where they stay: no stage names it."""

        def read() -> nn.Module:
            raise MemoryError(f"the host has no room for the weights of {type(module).__name__}, which no stage names")

        known = _Known(kept.component, [_Module(weights_of(module), kept.forms, read, None)])
        for _ in self._bring(known, ()):
            pass

    def keep(self, kept: KeptWeights, weights: Sequence[Tensor]) -> None:
        """Keep weights on the host, if it has room."""
        self._files.keep_if_possible(kept.component, weights)

    def add_empty(self, module: nn.Module, kept: KeptWeights, read: Read) -> None:
        """Take over a module whose weights are known; frees those that it has."""
        digest = kept.component.digest
        known = self._known.setdefault(digest, _Known(kept.component))
        split = None if self.cell is None else SplitModule.of(module, kept.forms, self.cell)
        added = _Module(weights_of(module), kept.forms, read, split)
        if split is not None:
            split.gather_into(known.pieces, partial(self._open, known, added))
        if known.is_here and known.modules:
            _share(known.modules[0], added)
        else:
            _empty(added)
        known.modules.append(added)

    def component(self, module: nn.Module, kept: KeptWeights) -> Component:
        """Return the component of a module, with the bytes that a device needs for it."""
        whole = kept.component
        return whole if self.cell is None else component_in(self.cell, module, whole, kept.forms)

    @contextmanager
    def shaped(self) -> Iterator[None]:
        """Give weights that are not on the device their shapes while entered, for libraries that look at these."""
        with ExitStack() as stack:
            for module in (one for known in self._known.values() for one in known.modules):
                stack.enter_context(_shaped(module) if module.split is None else module.split.shaped())
            yield

    def remove(self, module: nn.Module) -> None:
        """Forget a module. A component that no module has any more is forgotten; its file stays for a while."""
        ours = {id(one) for one in weights_of(module)}
        for digest, known in list(self._known.items()):
            known.modules = [one for one in known.modules if not ours.intersection(map(id, one.weights))]
            if not known.modules:
                del self._known[digest]

    def has(self, digests: Collection[str]) -> bool:
        return all(self._known[digest].is_here for digest in digests)

    def begin(self, digest: str) -> None:
        """Begin to bring a component to the device beside what runs there, if possible: `loading` waits for it."""
        known = self._known.get(digest)
        if known is None or known.is_here or known.sending is not None or self.cell is not None:
            return
        first = known.modules[0]
        known.sending = self._files.send(digest, first.weights, first.forms)

    def loading(self, digest: str, forgets: Sequence[str] = ()) -> Generator[None, None, int]:
        """Bring a component to the device, a block after each `next`; it is there when the iterator has ended.

        A component of no model here takes no block. Reading from the disk is one block; if its file has no room, the
        files of `forgets` are removed first. While another process reads it, a block is a short wait. If reading raises
        an error, or the iterator is closed before its end, nothing of the component is there. Returns the nanoseconds
        for which it came beside what ran.
        """
        known = self._known.get(digest)
        if known is None or known.is_here:
            return 0
        sending = known.sending
        try:
            yield from self._bring(known, forgets) if sending is None else sending.arriving()
        except BaseException:
            self.drop((digest,))
            raise
        known.sending = None
        first, *others = known.modules
        for other in others:
            _share(first, other)
        known.is_here = True
        return 0 if sending is None else sending.beside_ns

    def drop(self, digests: Collection[str]) -> None:
        """Free the memory of components on the device."""
        for digest in filter(self._known.__contains__, digests):
            known = self._known[digest]
            if known.sending is not None:  # The memory that the copy writes would be given to others.
                known.sending.end.synchronize()
                known.sending = None
            known.is_here = False
            known.pieces.clear()
            for module in known.modules:
                _empty(module)

    def _bring(self, known: _Known, forgets: Sequence[str]) -> Iterator[None]:
        first = known.modules[0]
        file = self._open(known, first)
        is_read = False
        while file is None and not is_read:
            with self._files.reading(known.component.digest, waits=False) as is_read:
                if is_read:
                    file = self._open(known, first) or self._read(known, first, forgets)
            if not is_read:
                time.sleep(_POLL_S)
            yield
        if file is not None and first.split is None:
            yield from file.bring(first.weights)
        elif file is not None and first.split is not None:
            yield from first.split.bring(file.weight, known.pieces)

    def _read(self, known: _Known, module: _Module, forgets: Sequence[str]) -> WeightsFile | None:
        """Read a component; return its file, or None if there is no room for one: then the module has its weights."""
        weights = weights_of(module.read())
        if self._files.keep_if_possible(known.component, weights, forgets):
            file = self._open(known, module)
            if file is not None:
                return file
        if module.split is not None:
            for _ in module.split.bring(weights.__getitem__, known.pieces):
                pass
            return None
        for mine, read, form in zip(module.weights, weights, module.forms, strict=True):
            mine.data = read.data.clone().to(form.device)
        return None

    def _open(self, known: _Known, module: _Module) -> WeightsFile | None:
        """Return the file of a component, if it is there. Others may remove it at any time."""
        try:
            return self._files.open(known.component.digest, module.forms)
        except FileNotFoundError:
            return None


def _configuration(module: nn.Module) -> str:
    """Return a component's configuration without names that begin with "_": they say where and by what it was read."""
    config: Any = getattr(module, "config", {})
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    return repr(sorted((name, repr(value)) for name, value in settings.items() if not name.startswith("_")))


def _share(first: _Module, other: _Module) -> None:
    """Give a module the weights of another."""
    for mine, its in zip(other.weights, first.weights, strict=True):
        mine.data = its.data


def _empty(module: _Module) -> None:
    for weight, form in zip(module.weights, module.forms, strict=True):
        weight.data = form.empty()


@contextmanager
def _shaped(module: _Module) -> Iterator[None]:
    """Give those weights of a module that have no memory their shapes, while entered."""
    pairs = zip(module.weights, module.forms, strict=True)
    lacking = [(weight, form) for weight, form in pairs if weight.numel() < form.count]
    for weight, form in lacking:
        weight.data = form.shaped()
    try:
        yield
    finally:
        for weight, form in lacking:
            weight.data = form.empty()
