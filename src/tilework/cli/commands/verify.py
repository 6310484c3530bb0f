"""`tilework verify`: makes an exact image again with the stock pipeline, and compares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilework.cli.console import UserError, console, out, print_json, require_serve_extra
from tilework.cli.models import ModelOptions
from tilework.cli.options.common import Adapter, AsJson, Compile, Quantize, examples

if TYPE_CHECKING:
    from tilework.cli.verify_run import Verdict

EXAMPLE = examples(
    "tilework verify out.png",
    "tilework verify answer.json --model ./sd3-medium --device cuda",
    "tilework verify edited.png --model ./kontext --picture image=photo.png",
)


def command(
    file: Annotated[
        Path, typer.Argument(help="A PNG that `generate` or an exact request made, or the JSON of its answer.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of its model here; default: the hub id in the file."),
    ] = None,
    adapter: Adapter = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quantize: Quantize = None,
    compiles: Compile = False,
    loras: Annotated[Path | None, typer.Option(help="Directory of its LoRAs.")] = None,
    picture: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Input image of the file's image, by its argument; repeatable."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make exact images again with the plain call of the stock pipeline, and compare them bit for bit.

    The file says what decides the bits: texts, seed, settings, dtype, attention, number of threads; but --quantize and
    --compile must be those of the server. The command names libraries and hardware that differ from those there.

    The exit status is 1 if an image is another one.
    """
    require_serve_extra()
    from tilework.cli.verify_run import exact_pictures, verdicts

    how = ModelOptions(adapter, device, quantize=quantize, compiles=compiles)
    found = exact_pictures(file)
    with console.status("drawing it again"):
        results = list(verdicts(found, model, how, loras, _pictures(picture or ())))
    is_good = all(one.is_good for one in results)
    if json:
        print_json({"identical": is_good, "pictures": [_document(one) for one in results]})
    else:
        for one in results:
            _say(one)
    if not is_good:
        raise typer.Exit(1)


def _pictures(given: list[str] | tuple[()]) -> Mapping[str, list[Path]]:
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UserError(f"picture is {text!r}; give NAME=FILE, as in image=photo.png")
        found[name].append(Path(path))
    return found


def _document(one: Verdict) -> dict[str, object]:
    return {**asdict(one), "differences": {name: list(values) for name, values in one.differences.items()}}


def _say(one: Verdict) -> None:
    if one.is_good:
        text = "the stock pipeline makes the same pixels"
    elif one.is_intact:
        text = "the stock pipeline makes other pixels"
    else:
        text = "its pixels are not those that were drawn"
    out.print(f"{one.place}: {text}", style="" if one.is_good else "red", highlight=False, soft_wrap=True)
    for name, (there, here) in one.differences.items():
        out.print(f"  other {name}: {there} there, {here} here", highlight=False, markup=False, soft_wrap=True)
