"""`tilework generate`: draws one image or video without a server."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilework.cli.console import UserError, out, print_json, progress, require_serve_extra
from tilework.cli.devices import check_setup, found_devices
from tilework.cli.models import checked_spec, loaded_family, model_source, options_of
from tilework.cli.options.common import Adapter, AsJson, SetupGroup, examples
from tilework.cli.options.groups import grouped
from tilework.core.model import ModelInfo, ModelSource
from tilework.core.wire.spec import Image, Spec

if TYPE_CHECKING:
    from tilework.server.schema.image_request import FileFormat

EXAMPLE = examples(
    'tilework generate "a red circle on a blue background" -o out.png',
    'tilework generate "a lighthouse" --model ./wan2.1 -o out.mp4',
)
FORMATS: dict[str, FileFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}


@grouped
def command(
    prompt: Annotated[str, typer.Argument(help="Text that says what to draw.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File: png, jpg, webp, or mp4.")] = Path("out.png"),
    model: Annotated[
        str, typer.Option(help="shapes, shapes-motion, a diffusers directory, hub id, or workflow.")
    ] = "shapes",
    adapter: Adapter = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; default: the model's.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip; default: the model's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; default: the model's.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default: the model's.")] = None,
    negative: Annotated[str | None, typer.Option(help="Text that says what not to draw; default: none.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the same seed gives the same image. Default: random.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    *,
    setup: SetupGroup,
    json: AsJson = False,
) -> None:
    """Draw one image or video in this process: no server, and no network if the model is local.

    A file for an image gets the first frame of a clip. A PNG records how it was made, as PNGs of exact requests do:
    `tilework verify` makes it again.
    """
    require_serve_extra()
    output_format = FORMATS.get(output.suffix.lower())
    if output_format is None:
        raise UserError(f"output is {str(output)!r}; use a name that ends in {', '.join(FORMATS)}")
    if not output.absolute().parent.is_dir():
        raise UserError(f"output is {str(output)!r}; the directory {output.absolute().parent} does not exist")
    found = found_devices(setup.device)
    found.number(1)
    source = model_source(model, options_of(setup, found, adapter=adapter, threads=threads))
    check_setup([source], None, memory_is_known=False)  # Components come and go in servers alone.
    if found.cards:
        from tilework.cli.memory_plan import planned_start
        from tilework.pipelines.fits.beside import NO_SERVER

        planned_start([source], found.cards[0].free_bytes, None, NO_SERVER)
    found.show()
    fields: dict[str, object] = {
        "prompt": prompt,
        "size": size,
        "num_frames": frames,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": negative,
        "seed": seed,
    }
    seconds, spec = _generate(source, fields, output, output_format, quiet=json)
    if json:
        print_json(
            {"path": str(output), "width": spec.width, "height": spec.height, "seed": spec.seed, "seconds": seconds}
        )
    else:
        out.print(f"{output}: {spec.width}x{spec.height}, {spec.steps} steps, seed {spec.seed}, {seconds:.2f} s")


def _generate(
    source: ModelSource, fields: dict[str, object], output: Path, output_format: FileFormat, quiet: bool
) -> tuple[float, Spec]:
    """Load, draw and write; return the seconds of drawing, and the spec in the size that came out."""
    family = loaded_family(source)
    spec = checked_spec(fields, family.info, is_video=output_format == "mp4")
    from tilework.pipelines.draw import draw
    from tilework.worker.models.describe import described

    started_s = time.monotonic()
    with progress(quiet) as bar:
        task = bar.add_task("denoising", total=spec.steps)
        image = draw(family, spec, lambda steps_done: bar.update(task, completed=steps_done))
    seconds = time.monotonic() - started_s
    spec = replace(spec, height=image.height, width=image.width)
    output.write_bytes(_file(image, spec, described(family, source, {}, {}, {}).info, output_format))
    return seconds, spec


def _file(image: Image, spec: Spec, info: ModelInfo, output_format: FileFormat) -> bytes:
    if spec.video is None:
        from tilework.server.calls.encode import encode
        from tilework.server.calls.provenance import provenance_of, text_chunks

        # Each step ran alone on one device, and the decode was whole.
        made = provenance_of(spec, info, image, is_exact=True)
        return encode(image, output_format, 90, texts=text_chunks(spec, made, frame=0))
    import torch

    from tilework.pipelines.video.export import video_file

    frames = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
    return video_file(frames.reshape(image.frames, image.height, image.width, 3), spec.video).content
