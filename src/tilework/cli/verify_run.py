"""Exact images, made again: what a file says of how they were made, and whether the stock pipeline agrees.

Needs the extra `serve`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from pydantic import ValidationError

from tilework.cli.console import UserError, user_errors
from tilework.cli.models import ModelOptions, model_source
from tilework.core.model import ModelSource
from tilework.core.wire.spec import Image
from tilework.pipelines.errors import ModelError
from tilework.pipelines.loading import library_versions, quiet
from tilework.pipelines.stock.plain_call import stock_picture
from tilework.server.calls.parsing.decode import decode
from tilework.server.calls.parsing.file_parts import Undecodable
from tilework.server.calls.provenance import CHUNK, digests_of, spec_of
from tilework.server.config import ConfigError
from tilework.server.lora_directory import loras_in
from tilework.server.schema.provenance import PictureMetadata
from tilework.worker.hardware import describe_hardware

_ASK = 'give a PNG of `tilework generate`, or of a request with "exact": true, as the file or as the JSON of its answer'


@dataclass(frozen=True, slots=True)
class ExactPicture:
    """An image with its metadata; `place` says where it was found. `pixels` are those in the file."""

    place: str
    metadata: PictureMetadata
    pixels: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result for one image: whether it has the pixels whose hash it carries (`is_intact`), and whether the stock
    pipeline makes them.

    `differences` are what is otherwise here than where it was made, each with the value there and the one here.
    """

    place: str
    is_intact: bool
    is_remade: bool
    differences: Mapping[str, tuple[str, str]]

    @property
    def is_good(self) -> bool:
        return self.is_intact and self.is_remade


def exact_pictures(file: Path) -> list[ExactPicture]:
    """Return the images of a PNG, or of a JSON file that holds the answer of a server.

    Raises:
        UserError: it holds none that is exact, or cannot be read.
    """
    with user_errors(OSError):
        content = file.read_bytes()
    found = [_of_png(place, png) for place, png in _pngs(str(file), content)]
    if not found:
        raise UserError(f"{file} holds no image; give a PNG, or the JSON of an answer with b64_json")
    return found


def verdicts(
    found: list[ExactPicture], model: str | None, how: ModelOptions, loras: Path | None, given: Mapping[str, list[Path]]
) -> Iterator[Verdict]:
    """Make each image again. `model` is where its model is here; None: as its file says.

    Raises:
        UserError: the model cannot be loaded, or a LoRA or a given image is not there or is another one.
    """
    quiet()
    made: dict[str, Image] = {}
    with user_errors(ConfigError):
        how = replace(how, loras=loras_in(loras) if loras is not None else ())
    for one in found:
        source = _source(one, model, how)
        provenance = one.metadata.provenance
        key = one.metadata.model_dump_json(exclude={"frame"})
        if key not in made:  # The frames of a clip.
            with user_errors(ModelError):
                made[key] = stock_picture(source, spec_of(one.metadata, _given(one, given)))
        again = made[key]
        size = 3 * again.height * again.width
        frame = bytes(again.pixels[one.metadata.frame * size : (one.metadata.frame + 1) * size])
        is_alone = provenance.settings.frames == 1
        yield Verdict(
            place=one.place,
            is_intact=not is_alone or hashlib.sha256(one.pixels).hexdigest() == provenance.pixels_sha256,
            is_remade=frame == one.pixels and hashlib.sha256(again.pixels).hexdigest() == provenance.pixels_sha256,
            differences=_differences(one, source),
        )


def _pngs(place: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    if content.startswith(b"\x89PNG"):
        yield place, content
        return
    try:
        entries = json.loads(content)["data"]
        for index, entry in enumerate(entries):
            yield f"{place}, image {index}", base64.b64decode(entry["b64_json"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{place} is neither a PNG, as files must be to say how they were made, nor the JSON of an answer; {_ASK}"
        ) from None


def _of_png(place: str, png: bytes) -> ExactPicture:
    try:
        with Pillow.open(io.BytesIO(png), formats=["PNG"]) as picture:
            text: Any = getattr(picture, "text", {}).get(CHUNK)
            pixels = picture.convert("RGB").tobytes()
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{place} is no PNG that can be read ({error}); {_ASK}") from None
    if text is None:
        raise UserError(
            f"{place} lacks the text chunk {CHUNK!r}, which says how it was made: it was changed, or drawn by another "
            "program, or by a server with --no-metadata; give the file as `tilework generate` or a server wrote it"
        )
    try:
        metadata = PictureMetadata.model_validate_json(text)
    except ValidationError:
        raise UserError(f"{place} was made by another version of tilework; verify it with that one") from None
    if not metadata.provenance.exact:
        seed = metadata.provenance.settings.seed
        raise UserError(
            f"{place} is not exact, so it depends on what else its server did; ask for it again with "
            f'"exact": true, "seed": {seed}'
        )
    return ExactPicture(place, metadata, pixels)


def _source(one: ExactPicture, model: str | None, how: ModelOptions) -> ModelSource:
    provenance = one.metadata.provenance
    known = {lora.name for lora in how.loras}
    if lacking := [lora.name for lora in provenance.settings.loras if lora.name not in known]:
        raise UserError(f"{one.place} uses the LoRA {lacking[0]}; give --loras DIR with {lacking[0]}.safetensors")
    return model_source(
        model or provenance.source,
        replace(
            how,
            dtype=provenance.dtype,
            threads=provenance.threads,
            attention=provenance.attention_backend,
            vae_tiling=provenance.vae_tiling,
        ),
    )


def _given(one: ExactPicture, given: Mapping[str, list[Path]]) -> dict[str, tuple[Image, ...]]:
    """Return the images that it was drawn from."""
    wanted = one.metadata.provenance.settings.pictures
    found: dict[str, tuple[Image, ...]] = {}
    for name, digests in wanted.items():
        if len(given.get(name, ())) != len(digests):
            counts = f"{len(digests)} of {name}, and {len(given.get(name, ()))} are given"
            raise UserError(f"{one.place} was drawn from images, {counts}; give --picture {name}=FILE for each")
        with user_errors(Undecodable, OSError):
            read = [file.read_bytes() for file in given[name]]
            found[name] = tuple(decode(each, is_mask="mask" in name, max_pixels=1 << 40).image for each in read)
        if digests_of(found)[name] != digests:
            raise UserError(f"{one.place} was drawn from another {name}; give the file that was sent")
    return found


def _differences(one: ExactPicture, source: ModelSource) -> dict[str, tuple[str, str]]:
    import torch

    provenance = one.metadata.provenance
    here = {"libraries": library_versions(), "hardware": describe_hardware(torch.device(source.device))}
    there = {"libraries": provenance.libraries, "hardware": provenance.hardware}
    return {name: (there[name], value) for name, value in here.items() if there[name] != value}
