"""Whether the commands of README and docs do what the pages say: they run as they stand there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.documents import PAGES, ROOT, Block, blocks_of, files_of
from suite.page_reader import Ending, Outcome, PageReader, copy_of_checkout
from suite.stats import exact
from zoo.registry import ZOO, build

MODELS = {
    "sd3-medium": "sd3",
    "sdxl": "sdxl",
    "sdxl-base": "sdxl",
    "animagine": "sdxl",
    "realvis": "sdxl",
    "flux-dev": "flux-dev",
    "flux2-dev": "flux2",
    "wan2.1": "wan21",
}
"""Models that pages take as the reader's own, and the tiny one that stands there in its place."""

SMALL = {"height": 64, "width": 64, "steps": 4}
CLIP = {"num_frames": 9}

GIVEN = (
    "tilework workload make tetriserve --rpm 12 --num 20 --out requests.jsonl && cp requests.jsonl r.jsonl",
    "tilework simulate requests.jsonl --cost flux1dev_h100_eager --devices 8 --schedule schedule.jsonl "
    "--events events.jsonl",
    "cp src/tilework/data/cost/flux1dev_h100_eager.json h100.json && cp h100.json l40s.json",
)
"""What makes the files that pages take as the reader's own."""

_GIVEN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Commands of these pages; one that takes longer than `limit_s` is stopped.

    Those of lab/docs/reproduction.md take hours; lab/tests/test_reproduction.py runs them small.
    """

    pages: tuple[str, ...] = tuple(str(page.relative_to(ROOT)) for page in PAGES if page.name != "reproduction.md")
    limit_s: float = 20.0

    @classmethod
    def make(cls, quick: bool) -> Commands:
        return cls(pages=("README.md", "docs/start.md"), limit_s=5.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        blocks = [block for name in self.pages for block in blocks_of(ROOT / name)]
        outcomes: list[Outcome] = []
        for outcome in _typed([block for block in blocks if not block.title], self.limit_s):
            outcomes.append(outcome)
            note(f"{outcome.place} {outcome.ending} after {outcome.seconds:.1f} s: {outcome.command}")
        failed = [one for one in outcomes if one.ending is Ending.FAILED]
        counts = Counter(one.ending for one in outcomes)
        needs = Counter(block.title for block in blocks if block.title)
        rows = tuple((one.place, one.command, one.output.replace("\n", " ")) for one in failed)
        return Finding(
            checks=(Check(what="commands that failed", measured=exact(len(failed)), high=0.0),),
            method=(
                "Each page is read in a copy of the checkout, with tiny models in place of the reader's, a workload, "
                "its log, and the files that the page shows. Commands of `console` blocks, and Python that calls a "
                "server, run as they stand, but for the port.",
                f"A command that still runs after {self.limit_s:g} s without an error is stopped. Servers "
                "must become ready. Calls of curl must be answered with a success.",
                "Blocks whose title says what they need are not run; the fast tests parse their `tilework` commands.",
            ),
            facts={"done": counts[Ending.DONE], "stopped": counts[Ending.STOPPED], "not run, in blocks": dict(needs)},
            tables=(Table(title="Failed", columns=("where", "command", "output"), rows=rows),) if rows else (),
        )


def _typed(blocks: list[Block], limit_s: float) -> Iterator[Outcome]:
    with TemporaryDirectory(prefix="tilework-pages-") as folder:
        here = Path(folder)
        given = copy_of_checkout(ROOT, here / "given")
        for name, model in MODELS.items():
            build(ZOO[model]).save_pretrained(str(given / name))
            defaults = SMALL | (CLIP if model == "wan21" else {})
            (given / name / "tilework.json").write_text(json.dumps(defaults))
        with closing(PageReader(checkout=given, programs=here / "programs", limit_s=_GIVEN_S)) as reader:
            for outcome in reader.read(Block(page=ROOT / "given", line=0, title="", commands=GIVEN)):
                if outcome.ending is not Ending.DONE:
                    raise CaseFailed(f"{outcome.command}: {outcome.output}")
        for number, page in enumerate(dict.fromkeys(block.page for block in blocks)):
            checkout = copy_of_checkout(given, here / f"page{number}")
            for name, text in files_of(page).items():
                (checkout / name).write_text(text)
            with closing(PageReader(checkout=checkout, programs=here / "programs", limit_s=limit_s)) as reader:
                for block in (one for one in blocks if one.page == page):
                    yield from reader.read(block)
