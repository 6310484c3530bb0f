"""The pictures that a client gives: the argument of the model that each one is, their limits, and their pixels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilework.core.model import ModelInfo, PictureInput
from tilework.core.wire.spec import Image
from tilework.server.bounded.long_text import LONG_TEXT_BYTES, LongText
from tilework.server.calls.errors import InvalidValue, invalid
from tilework.server.calls.parsing.base64_pieces import decode_base64
from tilework.server.calls.parsing.decode import DecodedPicture, decode
from tilework.server.calls.parsing.fields import renamed
from tilework.server.calls.parsing.file_parts import Undecodable
from tilework.server.config import ServerConfig
from tilework.server.schema.picture_fields import IMAGE, IMAGES, INPUT_REFERENCE, MASK, PICTURE_FIELDS
from tilework.store.given_pictures import GivenPictures

GIVE = "base64 or a data URL (data:image/png;base64,...) of a PNG, JPEG or WebP file"
EDITS = "POST /v1/images/edits"
_SHOWN_CHARS = 100  # A message cuts it further.
_HEAD_CHARS = 200  # `data:image/png;base64,` and what some clients add.
_WHITE_ON_TRANSPARENT = (
    "is white on a transparent ground, and the transparent part is drawn anew. To draw the white part, give a mask "
    "without transparency: white where to draw, black elsewhere."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPicture:
    """A picture as its client sent it: a file, or a text that holds one. `place` is its field, `name` the argument.

    Its transparent part, if it has one, is the picture for the argument `mask`.
    """

    place: str
    name: str
    is_mask: bool
    mask: PictureInput | None = None
    content: str | bytes | LongText = field(repr=False)

    def refused(self, remedy: str) -> InvalidValue:
        return invalid(self.place, _briefly(self.content), remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFile:
    """A picture that was accepted: `file` is the name of its file, which is kept for a later start of the server."""

    name: str
    is_mask: bool
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures that a call gives: pixels by argument of the model, and each picture as its client gave it.

    A picture whose transparent part is a mask is among `given` a second time, as that mask. `contents` are the files of
    `given`, if they are to be kept. `warnings` are for the client.
    """

    images: Mapping[str, tuple[Image, ...]] = field(default_factory=dict)
    given: Sequence[GivenPicture] = ()
    contents: Sequence[bytes] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()


NO_PICTURES = Pictures()


def taken_pictures(
    fields: Mapping[str, object], info: ModelInfo, *, is_edit: bool = False
) -> tuple[dict[str, object], tuple[GivenPicture, ...]]:
    """Split a call into the fields that are no pictures, and its pictures.

    In an edit, the transparent part of the main picture, the first if there are several, is its mask, unless one is
    given, as in OpenAI's API.

    Raises:
        InvalidValue: the model takes no such picture, or not as many; one that it needs is missing; or a value is none.
    """
    inputs = {one.name: one for one in info.pictures}
    names = _field_names(info)
    meant = names.keys() | PICTURE_FIELDS
    given: dict[str, tuple[GivenPicture, ...]] = {}
    for field_name, value in fields.items():
        if value is None or field_name not in meant:
            continue
        one = inputs.get(names.get(field_name, ""))
        if one is None:
            raise _not_taken(field_name, value, info)
        if one.name in given:
            raise invalid(field_name, _briefly(value), f"{given[one.name][0].place} is given as well: leave one out.")
        given[one.name] = _of_field(field_name, value, one)
    mask = _mask_within(given, info) if is_edit else None
    _check_complete(given, info, mask, is_edit=is_edit)
    if mask is not None and (main := main_picture(info)) is not None:
        first, *others = given[main.name]
        given[main.name] = (replace(first, mask=mask), *others)
    rest = {name: value for name, value in fields.items() if name not in meant}
    return rest, tuple(one for each in given.values() for one in each)


def takes(fields: Mapping[str, object], info: ModelInfo, *, is_edit: bool = False) -> bool:
    """Return whether a call with these fields has pictures that the model takes, and all that it needs.

    They are not decoded yet, so a picture that must contain a mask counts as lacking it.
    """
    try:
        _, given = taken_pictures(renamed(fields, info), info, is_edit=is_edit)
    except InvalidValue:
        return False
    return not any(one.mask is not None and one.mask.required for one in given)


def reject_edits(info: ModelInfo) -> None:
    """Raise InvalidValue if the model takes no picture that could be edited."""
    if main_picture(info) is None:
        raise InvalidValue(f"{IMAGE} is not accepted: {_text_alone(info)}", field=IMAGE, code="unsupported_value")


def decoded(given: Sequence[GivenPicture], config: ServerConfig, *, keeps_files: bool) -> Pictures:
    """Decode all pictures of a call; to be called on a thread.

    Raises:
        InvalidValue: one is too large, damaged, or no picture.
    """
    left = config.max_input_pixels
    contents: list[bytes] = []
    parts: list[GivenPicture] = []
    warnings: list[str] = []
    images: dict[str, tuple[Image, ...]] = {}

    def add(one: GivenPicture, content: bytes, max_pixels: int | None) -> DecodedPicture:
        try:
            found = decode(content, is_mask=one.is_mask, max_pixels=max_pixels)
        except Undecodable as error:
            raise one.refused(str(error)) from None
        images[one.name] = (*images.get(one.name, ()), found.image)
        parts.append(one)
        contents.extend([content] if keeps_files else [])
        return found

    for one in given:
        content = _file(one, config.max_picture_bytes)
        found = add(one, content, left)
        left -= found.image.height * found.image.width
        if found.is_white_on_transparent:
            warnings.append(_inversion_warning(one, is_strict=config.strict))
        if one.mask is not None and found.has_transparent_part:
            part = replace(one, name=one.mask.name, is_mask=True, mask=None)
            add(part, content, None)  # `left` counts these pixels already.
        elif one.mask is not None and one.mask.required:
            raise _mask_missing(one, one.mask.name)
    return Pictures(images=images, given=parts, contents=contents, warnings=tuple(warnings))


def _inversion_warning(mask: GivenPicture, *, is_strict: bool) -> str:
    """Return the warning about a mask that may mean the opposite; a strict server refuses the mask."""
    if is_strict:
        raise mask.refused(f"It {_WHITE_ON_TRANSPARENT}")
    return f"{mask.place} {_WHITE_ON_TRANSPARENT}"


def _mask_missing(picture: GivenPicture, name: str) -> InvalidValue:
    message = (
        f"{name} is missing, and {picture.place} has no transparent part to use instead. Give {GIVE}, or make the part "
        "to draw anew transparent."
    )
    return InvalidValue(message, field=name, code="missing_value")


def decoded_again(files: Iterable[PictureFile], kept: GivenPictures) -> dict[str, tuple[Image, ...]]:
    """Decode files that were accepted before.

    Raises:
        Undecodable: this version cannot read one.
        OSError: one cannot be read, or is not there any more.
    """
    images: dict[str, tuple[Image, ...]] = {}
    for one in files:
        image = decode(kept.read(one.file), is_mask=one.is_mask, max_pixels=None).image
        images[one.name] = (*images.get(one.name, ()), image)
    return images


def main_picture(info: ModelInfo) -> PictureInput | None:
    """Return the picture that a client means by `image`: the one of this name, or else the first that is no mask."""
    drawn = [one for one in info.pictures if not one.is_mask]
    return next((one for one in drawn if one.name == IMAGE), drawn[0] if drawn else None)


def _main_mask(info: ModelInfo) -> PictureInput | None:
    """Return the mask that a client means by `mask`."""
    return next((one for one in info.pictures if one.is_mask), None)


def _mask_within(given: Mapping[str, tuple[GivenPicture, ...]], info: ModelInfo) -> PictureInput | None:
    """Return the mask that the main picture may contain, since none is given by itself."""
    main, mask = main_picture(info), _main_mask(info)
    if main is None or mask is None or main.name not in given or mask.name in given:
        return None
    return mask


def _field_names(info: ModelInfo) -> dict[str, str]:
    """Return the argument that each field means; names that other servers have are aliases."""
    names: dict[str, str] = {}
    if (main := main_picture(info)) is not None:
        names |= dict.fromkeys((IMAGE, IMAGES, INPUT_REFERENCE), main.name)
    if (mask := _main_mask(info)) is not None:
        names |= dict.fromkeys((MASK, "mask_image"), mask.name)
    return names | {one.name: one.name for one in info.pictures}


def _of_field(field_name: str, value: object, one: PictureInput) -> tuple[GivenPicture, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise invalid(field_name, value, f"Give {GIVE}, or leave it out.")
    if len(values) > one.most:
        most = "one image" if one.most == 1 else f"at most {one.most} images"
        message = f"{field_name} has {len(values)} images, which is not accepted. Give {most}."
        raise InvalidValue(message, field=field_name)
    return tuple(
        GivenPicture(place=field_name, name=one.name, is_mask=one.is_mask, content=_content(field_name, each))
        for each in values
    )


def _content(field_name: str, value: object) -> str | bytes | LongText:
    """Return a file, a text, or either in an object of OpenAI's: `{"image_url": "data:..."}`."""
    inner = value
    for name in ("image_url", "url"):
        inner = inner.get(name, inner) if isinstance(inner, dict) else inner
    if not isinstance(inner, str | bytes | LongText):
        raise invalid(field_name, _briefly(value), f"Give {GIVE}.")
    return inner


def _file(one: GivenPicture, max_bytes: int) -> bytes:
    """Return the content of a picture file. Raises InvalidValue."""
    content = one.content
    if not isinstance(content, bytes):
        start = content[:_HEAD_CHARS] if isinstance(content, str) else content.head(_HEAD_CHARS)
        if re.match(r"\s*https?:", start[:20], re.IGNORECASE):
            raise one.refused(f"This server fetches nothing: send the image itself, as {GIVE}.")
        head, comma, _ = start.partition(",") if start[:5].lower() == "data:" else ("", "", "")
        if comma and not head.lower().endswith(";base64"):
            raise one.refused(f"Give {GIVE}.")
        if _num_bytes(content) > most_base64_bytes(max_bytes):
            raise one.refused(f"Give a file of at most {max_bytes} bytes.")
        try:
            content = decode_base64(content, len(head + comma))
        except ValueError:
            raise one.refused(f"It is no base64: give {GIVE}.") from None
    if len(content) > max_bytes:
        raise one.refused(f"It has {len(content)} bytes: give a file of at most {max_bytes} bytes.")
    return content


def most_base64_bytes(max_picture_bytes: int) -> int:
    """Return the most bytes that a picture of this size takes as base64; with line breaks and escapes it takes less."""
    return 2 * max_picture_bytes + LONG_TEXT_BYTES


def _num_bytes(content: str | LongText) -> int:
    return content.num_bytes if isinstance(content, LongText) else len(content)


def _check_complete(
    given: Mapping[str, tuple[GivenPicture, ...]], info: ModelInfo, mask: PictureInput | None, *, is_edit: bool
) -> None:
    """Check that no picture is missing; the `mask` may be within another picture. Raises InvalidValue."""
    main = main_picture(info)
    needed = [one.name for one in info.pictures if one.required and one is not mask and one.name not in given]
    if is_edit and main is not None and not given:
        needed.insert(0, main.name)
    masks = [each[0] for each in given.values() if each[0].is_mask]
    if masks and main is not None and main.name not in given:
        raise masks[0].refused(f"A mask belongs to an image: give {main.name} as well.")
    if needed:
        message = (
            f"{needed[0]} is missing: {info.name} draws from an image. Give {GIVE}, or send it as a file of a form: "
            f"{EDITS} and /v1/videos take one."
        )
        raise InvalidValue(message, field=needed[0], code="missing_value")


def _not_taken(field_name: str, value: object, info: ModelInfo) -> InvalidValue:
    if main_picture(info) is None:
        remedy = _text_alone(info)
    else:
        remedy = f"{info.name} takes {', '.join(one.name for one in info.pictures)}: give that, or leave it out."
    return invalid(field_name, _briefly(value), remedy, code="unsupported_value")


def _text_alone(info: ModelInfo) -> str:
    return f"{info.name} draws from text alone: leave images out, and use POST /v1/images/generations."


def _briefly(value: object) -> object:
    """Return enough of a value to recognise it."""
    if isinstance(value, bytes):
        return f"a file of {len(value)} bytes"
    if isinstance(value, LongText):
        return value.head(_SHOWN_CHARS)
    if isinstance(value, list):
        return [_briefly(each) for each in value[:3]]
    if isinstance(value, dict):
        return {str(key)[:_SHOWN_CHARS]: _briefly(each) for key, each in list(value.items())[:3]}
    return value[:_SHOWN_CHARS] if isinstance(value, str) else value
