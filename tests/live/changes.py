"""Random sequences of changes of a running server: which files there are, and steps as data, drawn from a seed.

What carries them out is in `test_random_changes.py`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

import tiny
from loras import denoiser_of, save_lora

ANCHOR = "anchor"
"""The model that is always served; its requests must not notice what else happens."""
NAMES = ("one", "two", "q/three")
BAD_NAMES = (".", "..", "../x", "q/loras/z", "a b", "")
CLIPS, MISSING = "clips", "missing"
DAMAGED = ("without a part", "cut off")
GOOD = ("other weights", "other stages", CLIPS)
LORAS = ("ink", "of another model", "no LoRA")
CALLS = ("image", "promise", "exact", "two", "cancelled", "with LoRA", "edit", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """`POST /v1/admin/models`."""

    files: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remove:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLora:
    model: str
    name: str
    file: str


@dataclass(frozen=True, slots=True)
class RemoveLora:
    model: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """Something of this model, by kind."""

    model: str
    kind: str


@dataclass(frozen=True, slots=True)
class Damage:
    """Files of a model that is served, maybe, are changed; what was read is what is served. Repaired by the next."""

    files: str


@dataclass(frozen=True, slots=True)
class Repair: ...


@dataclass(frozen=True, slots=True)
class KillWorker: ...


@dataclass(frozen=True, slots=True)
class KillServer: ...


@dataclass(frozen=True, slots=True)
class Look:
    """Metrics, models, and the page's data."""


@dataclass(frozen=True, slots=True)
class Together:
    """Steps at once."""

    steps: tuple[Step, ...]


Step = Add | Remove | AddLora | RemoveLora | Call | Damage | Repair | KillWorker | KillServer | Look | Together


def sequence(seed: int, length: int) -> list[Step]:
    """The steps of a seed: a third are changes, a fifth of which cannot be; a server is killed in one of four."""
    random = Random(f"changes/{seed}")
    steps = [_step(random) for _ in range(length)]
    if random.random() < 0.25:
        steps.insert(random.randrange(1, length), KillServer())
    return steps


def _step(random: Random) -> Step:
    kinds = (
        _add,
        _add,
        _remove,
        _add_lora,
        _remove_lora,
        _call,
        _call,
        _call,
        _together,
        _damage,
        _repair,
        _kill,
        _look,
    )
    return random.choice(kinds)(random)


def _add(random: Random) -> Add:
    fields: dict[str, Any] = {"measure": random.random() < 0.8}
    if random.random() < 0.2:
        fields["aliases"] = [random.choice((*NAMES, ANCHOR, "alias", "..")) for _ in range(random.choice((1, 1, 2)))]
    if random.random() < 0.2:
        fields["dtype"] = random.choice(("float32", "bfloat16", "int8"))
    if random.random() < 0.2:
        fields["loras"] = random.choice(("loras", MISSING))
    files = random.choice((*GOOD, *GOOD, *GOOD, *DAMAGED, MISSING, "too large"))
    name = random.choice((*NAMES, *NAMES, *NAMES, ANCHOR, random.choice(BAD_NAMES)))
    return Add(files=files, name=name, fields=fields)


def _remove(random: Random) -> Remove:
    return Remove(random.choice((*NAMES, *NAMES, "unknown", "..")))


def _add_lora(random: Random) -> AddLora:
    name = random.choice(("ink", "ink", "chalk", "..", "."))
    return AddLora(model=random.choice((ANCHOR, *NAMES)), name=name, file=random.choice((*LORAS, "ink", MISSING)))


def _remove_lora(random: Random) -> RemoveLora:
    return RemoveLora(random.choice((ANCHOR, *NAMES)), random.choice(("ink", "ink", "chalk", "..")))


def _call(random: Random) -> Call:
    return Call(random.choice((ANCHOR, *NAMES, *NAMES)), random.choice(CALLS))


def _together(random: Random) -> Together:
    kinds = (_add, _remove, _add_lora, _call, _call)
    return Together(tuple(random.choice(kinds)(random) for _ in range(random.choice((2, 2, 3)))))


def _damage(random: Random) -> Damage:
    return Damage(random.choice(("other weights", "other stages")))


def _repair(_random: Random) -> Repair:
    return Repair()


def _kill(_random: Random) -> KillWorker:
    return KillWorker()


def _look(_random: Random) -> Look:
    return Look()


def make_files(root: Path) -> None:
    """The models and LoRAs that steps name, each in a folder or file of that name."""
    tiny.prepare()
    for name, factor in ((ANCHOR, 1.0), ("other weights", 1.5)):
        pipeline = tiny.build_sd3()
        with torch.no_grad():
            for weight in denoiser_of(pipeline).parameters():
                weight.mul_(factor)
        tiny.save(pipeline, root / name, name.replace(" ", "-"))
    tiny.save(tiny.build_sdxl(), root / "other stages", "other-stages")
    for name in ("other weights", "other stages"):
        keep(root, name)
    tiny.save(tiny.build_sd3(num_heads=16), root / "too large", "too-large")
    shutil.copytree(root / ANCHOR, root / "without a part")
    shutil.rmtree(root / "without a part" / "transformer")
    shutil.copytree(root / ANCHOR, root / "cut off")
    cut_off(root / "cut off")
    save_lora(tiny.build_sd3(), root / "loras" / "ink.safetensors", 1, text_encoder=True)
    save_lora(tiny.build_sdxl(), root / "of another model.safetensors", 1)
    (root / "no LoRA.safetensors").write_text("nothing of the kind")


def cut_off(model: Path) -> None:
    """Damage the weights of a model, as an interrupted copy does. Those that are open elsewhere stay as they are."""
    for file in list((model / "transformer").glob("*.safetensors")) + list((model / "unet").glob("*.safetensors")):
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[: len(content) // 2])


def lora_file(root: Path, name: str) -> Path:
    return root / "loras" / "ink.safetensors" if name == "ink" else root / f"{name}.safetensors"


def keep(root: Path, files: str) -> None:
    """Keep a copy of a model, with which `restore` undoes damage."""
    shutil.copytree(root / files, root / "kept" / files)


def restore(root: Path, files: str) -> None:
    shutil.rmtree(root / files)
    shutil.copytree(root / "kept" / files, root / files)
