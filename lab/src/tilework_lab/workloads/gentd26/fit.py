"""The parameters fitted to GenTD26, from the file that ships, and the service time that they define."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tilework.core.request import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFit:
    """A checkpoint by its popularity rank, from 1 on, and what its requests ask for.

    `fresh` is its share of the draws that depend on nothing. A user stays with it in a session with probability `stay`.
    `warm_s` is the inference of one image of mean size in 30 steps, in seconds. `sizes` are the shares of its sizes;
    the sizes of all checkpoints have the same order.
    """

    rank: int
    fresh: float
    stay: float
    images: Mapping[int, float]
    steps: Mapping[int, float]
    warm_s: float
    sizes: Mapping[Shape, float]
    unit_pixels: int
    mean_cost: float

    @property
    def pipeline(self) -> str:
        """The name of the pipeline that has this checkpoint."""
        return f"gentd26-{self.rank:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Values of the file that the generator needs. Times are in seconds, shares from 0 to 1.

    `sessions_per_hour` has the 24 hours of a working day. Session lengths are lognormal (`length_mu`, `length_sigma`),
    rounded, from 1 to `longest`. Gaps are one second with probability `together`, else a mixture of lognormals (weight,
    median, sigma) up to `longest_gap_s`. `sigma` and `theta` are those of the Pitman-Yor process of users.
    `switch_anew` is how often a user begins a new session with another checkpoint, `returns` how often a switch goes
    back to one that the user had before. `kappa` says how little the shares of fresh draws differ from day to day.
    `same_*` are how often a request of a session is like the one before it.
    """

    checkpoints: Sequence[CheckpointFit]
    sessions_per_hour: Sequence[float]
    mean_length: float
    mean_infer_s: float
    length_mu: float
    length_sigma: float
    longest: int
    together: float
    gaps: Sequence[tuple[float, float, float]]
    longest_gap_s: float
    sigma: float
    theta: float
    switch_anew: float
    returns: float
    kappa: float
    same_images: float
    same_steps: float
    same_size: float
    image_slope: float
    pixel_exponent: float

    def step_s(self, checkpoint: CheckpointFit, size: Shape, images: int) -> float:
        """Return the time of one step for this many images of this size: a thirtieth of the inference in 30 steps.

        Inference = warm_s / mean_cost x (1 + image_slope (n - 1)) x (pixels / unit_pixels) ^ pixel_exponent.
        """
        relative: float = (size.height * size.width / checkpoint.unit_pixels) ** self.pixel_exponent
        return checkpoint.warm_s / checkpoint.mean_cost * (1 + self.image_slope * (images - 1)) * relative / 30


@cache
def read_fit() -> Fit:
    """Return the parameters of the file that ships."""
    place = resources.files("tilework_lab").joinpath("data", "gentd26.json")
    document = json.loads(place.read_text("utf-8"))
    sessions = document["sessions"]
    users = document["users"]
    all_checkpoints = document["checkpoints"]
    persistence = document["persistence"]
    service = document["reference_service"]
    switch = all_checkpoints["switch"]
    length = sessions["length"]
    gap = sessions["gap_s"]
    return Fit(
        checkpoints=_checkpoints(document),
        sessions_per_hour=document["arrivals"]["sessions_per_hour_workday"],
        mean_length=sessions["mean_length"],
        mean_infer_s=service["mean_infer_s"],
        length_mu=length["mu"],
        length_sigma=length["sigma"],
        longest=length["cap"],
        together=gap["batch_share"],
        gaps=tuple(zip(gap["weights"], gap["median_s"], gap["sigma"], strict=True)),
        longest_gap_s=float(sessions["idle_gap_s"]),
        sigma=users["sigma"],
        theta=users["theta"],
        switch_anew=switch["same_user_new_session"],
        returns=switch["switch_returns_to_an_earlier_checkpoint_of_the_user"],
        kappa=all_checkpoints["day_drift"]["kappa"],
        same_images=persistence["same_n"],
        same_steps=persistence["same_steps"],
        same_size=document["sizes"]["same_size_within_session"],
        image_slope=service["image_slope"],
        pixel_exponent=service["pixel_exponent"],
    )


def _checkpoints(document: Mapping[str, Any]) -> tuple[CheckpointFit, ...]:
    """Return all checkpoints by rank.

    Those of the tail share one row; their fresh draws are Zipf-Mandelbrot by rank.
    """
    section = document["checkpoints"]
    tail = section["tail"]
    law = section["fresh_draw_zipf_mandelbrot"]
    ranks = range(tail["first_rank"], tail["first_rank"] + tail["checkpoints"])
    weights = [(rank + law["q"]) ** -law["s"] for rank in ranks]
    rows = [
        tail | {"rank": rank, "fresh_share": tail["fresh_share"] * weight / sum(weights)}
        for rank, weight in zip(ranks, weights, strict=True)
    ]
    return tuple(_checkpoint(row, document, tail) for row in (*section["per_rank"], *rows))


def _checkpoint(row: Mapping[str, Any], document: Mapping[str, Any], tail: Mapping[str, Any]) -> CheckpointFit:
    """Read a checkpoint. One without a fitted inference, since it fails or always has LoRAs, gets that of the tail."""
    kind = "large" if row["rank"] in document["sizes"]["large_ranks"] else "small"
    family = document["sizes"]["families"][kind]
    return CheckpointFit(
        rank=row["rank"],
        fresh=row["fresh_share"],
        stay=row["stay_in_session"],
        images={int(number): share for number, share in row["n_images"].items()},
        steps={int(number): share for number, share in row["steps"].items()},
        warm_s=row["exec_p10_s_at_1_image"] or tail["exec_p10_s_at_1_image"],
        sizes={Shape.parse(size): share for size, share in family["mix"].items()},
        unit_pixels=family["unit_pixels"],
        mean_cost=family["mean_cost"],
    )
