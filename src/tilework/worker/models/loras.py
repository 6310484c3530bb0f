"""The LoRAs of a worker's models, and which of them are on its device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tilework.core.component import Component
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource, Source
from tilework.pipelines.family import Family
from tilework.pipelines.lora import InvalidLora, Loras


class LoraChanged(Exception):
    """The file of a LoRA has changed since it was added."""


@dataclass(slots=True, eq=False)
class _Known:
    """A LoRA of a model. `content` is the hash of its file."""

    name: str
    file: Path
    content: str
    changes: frozenset[str]
    loaded: Loras
    digest: str
    is_here: bool = False


class WorkerLoras:
    """LoRAs by model and name, and by digest. With `on_demand` they reach the device when a command loads them."""

    def __init__(self, *, on_demand: bool) -> None:
        self._on_demand = on_demand
        self._named: dict[tuple[str, str], _Known] = {}
        self._by_digest: dict[str, _Known] = {}

    def add_all(self, family: Family, source: Source) -> tuple[dict[str, Lora], dict[str, str]]:
        """Add all LoRAs of a source; return those that requests may use, and for the others the reasons why not."""
        usable: dict[str, Lora] = {}
        refused: dict[str, str] = {}
        for one in source.loras if isinstance(source, ModelSource) else ():
            try:
                usable[one.name] = self.add(family.info.name, family, one)
            except InvalidLora as error:
                refused[one.name] = str(error)
        return usable, refused

    def add(self, model: str, family: Family, source: LoraSource) -> Lora:
        """Read a LoRA, which checks that it fits this model. The model's weights must be on the device.

        Raises:
            InvalidLora: it does not fit, or cannot be read.
        """
        if family.loras is None:
            raise InvalidLora(f"{model} is simulated, and takes no LoRAs")
        file = Path(source.path)
        added = family.loras.add(source.name, file)
        content = _hash(file)
        digest = sha256(f"{model} {source.name} {content}".encode()).hexdigest()[:16]
        lora = Lora(changes=added.changes, component=Component(digest, added.num_bytes))
        known = self._add(model, family.loras, source, lora, content)
        if self._on_demand:
            self._drop(known)
        else:
            known.is_here = True
        return lora

    def add_known(self, model: str, family: Family, source: LoraSource, lora: Lora, content: str) -> None:
        """Add a LoRA that another process has read: `lora` is the result, `content` the hash of the file."""
        assert family.loras is not None
        self._add(model, family.loras, source, lora, content)

    def _add(self, model: str, loaded: Loras, source: LoraSource, lora: Lora, content: str) -> _Known:
        assert lora.component is not None
        digest = lora.component.digest
        known = _Known(source.name, Path(source.path), content, lora.changes, loaded, digest)
        self._named[model, source.name] = self._by_digest[digest] = known
        return known

    def content(self, model: str, name: str) -> str:
        """Return the hash of a LoRA's file."""
        return self._named[model, name].content

    def remove(self, model: str, name: str | None = None) -> None:
        """Forget a LoRA of a model, or all of them."""
        for key in [one for one in self._named if one[0] == model and name in (None, one[1])]:
            known = self._named.pop(key)
            self._by_digest = {digest: one for digest, one in self._by_digest.items() if one is not known}
            if known.is_here:
                self._drop(known)

    def load(self, digests: Collection[str]) -> None:
        """Bring LoRAs to the device; digests of no model here are ignored.

        Raises the errors of reading them, and LoraChanged; then none of them is there.
        """
        try:
            for known in filter(None, map(self._by_digest.get, digests)):
                if not known.is_here:
                    if _hash(known.file) != known.content:
                        raise LoraChanged(f"{known.file} is another file now than when {known.name!r} was added")
                    known.loaded.add(known.name, known.file)
                    known.is_here = True
        except BaseException:
            self.drop(digests)
            raise

    def drop(self, digests: Collection[str]) -> None:
        """Free the memory of LoRAs on the device."""
        for known in filter(None, map(self._by_digest.get, digests)):
            if known.is_here:
                self._drop(known)

    def _drop(self, known: _Known) -> None:
        known.loaded.remove(known.name)
        known.is_here = False

    def digests(self, model: str) -> list[str]:
        """Return the digests of all LoRAs of a model."""
        return [known.digest for (its_model, _), known in self._named.items() if its_model == model]

    def changing(self, model: str, components: Collection[str], used: Sequence[UsedLora]) -> tuple[UsedLora, ...]:
        """Return those of the LoRAs that may change one of the components; unknown ones may."""
        known = ((one, self._named.get((model, one.name))) for one in used)
        return tuple(one for one, lora in known if lora is None or not lora.changes.isdisjoint(components))

    def use(self, model: str, family: Family, components: Collection[str], used: Sequence[UsedLora]) -> list[str]:
        """Compute with these LoRAs from now on, for a stage with these components.

        Returns the names of those that change one of the components but are not here; none is used then.
        """
        if family.loras is None:
            return []
        here = [one for one in used if (known := self._named.get((model, one.name))) is not None and known.is_here]
        missing = [one.name for one in self.changing(model, components, used) if one not in here]
        family.loras.use(() if missing else here)
        return missing


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        digest = sha256()
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
