"""`tilework classes`: how many of the installed diffusers' pipelines are served exactly, and why others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilework.cli.console import UserError, console, out, print_json, require_serve_extra
from tilework.cli.options.common import AsJson, examples

if TYPE_CHECKING:
    from tilework.pipelines.support.installed import Score

EXAMPLE = examples("tilework classes", 'tilework classes --kind "image to video" --json')


def command(
    kind: Annotated[str | None, typer.Option(help="Show this kind alone, such as edit, modular or apart.")] = None,
    json: AsJson = False,
) -> None:
    """Show which classes of the installed diffusers are served exactly, by kind, and why each other one is not.

    A class is exact if the tests of this version of tilework found that it gives the stock pipeline's images bit for
    bit, with the version of diffusers that is named. Classes `apart` make no images or clips, or parts of them, or are
    deprecated. The score counts text to image, edit, text to video and image to video. See docs/models.md.
    """
    require_serve_extra()
    with console.status("importing the pipelines of diffusers"):
        from tilework.pipelines.support.installed import APART, MODULAR, score
        from tilework.pipelines.support.record import KINDS

        found = score()
    kinds = (*KINDS, MODULAR, APART)
    if kind not in (None, *kinds):
        raise UserError(f"kind is {kind!r}; choose one of {', '.join(kinds)}")
    shown = kinds if kind is None else (kind,)
    if json:
        print_json(_document(found, shown))
    else:
        _print(found, shown)


def _document(found: Score, kinds: tuple[str, ...]) -> dict[str, Any]:
    from tilework.pipelines.support.installed import SCORED, count_served

    scored = found.of(*SCORED)
    return {
        "diffusers": found.installed,
        "tested_with": found.tested,
        "score": {"kinds": list(SCORED), "served": count_served(scored), "classes": len(scored)},
        "kinds": {kind: {"served": count_served(found.of(kind)), "classes": len(found.of(kind))} for kind in kinds},
        "classes": [
            {"name": one.name, "kind": one.kind, "served": one.is_served, "reason": one.reason}
            for one in found.of(*kinds)
        ],
    }


def _print(found: Score, kinds: tuple[str, ...]) -> None:
    from tilework.pipelines.support.installed import SCORED, count_served, sentence

    out.print(f"{sentence(found)} ({', '.join(SCORED)}) are served exactly", soft_wrap=True, highlight=False)
    if found.tested != found.installed:
        out.print(
            f"tested with diffusers {found.tested}; with {found.installed} exactness was not tested", soft_wrap=True
        )
    for kind in kinds:
        classes = found.of(kind)
        out.print(f"\n{kind}: {count_served(classes)} of {len(classes)}", highlight=False)
        for one in classes:
            says = "; ".join(filter(None, ("served" if one.is_served else "not served", one.reason)))
            out.print(f"  {one.name}: {says}", soft_wrap=True, highlight=False, markup=False)
