"""What an engine measures of its models when it starts, and of one that is added."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.fake_measurer import INFO, SHAPES, SLOWER, FakeExecutor, FakeMeasurer
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.component import Component, LoadSource
from tilework.core.cost_row import CostRow
from tilework.core.lora import Lora
from tilework.core.request import Shape
from tilework.core.wire.reports import LoadedModel, NotLoaded
from tilework.cost.profiles import Profiles
from tilework.cost.table import CostTable
from tilework.runtime.executor import WorkerStartFailed
from tilework.runtime.models.costs import CostCache, calibration_shapes, trial_shapes, warm_up
from tilework.runtime.models.measuring import Measuring, _shared, with_weights
from tilework.runtime.models.model_costs import ModelCosts


def model(name: str, parameters: int = 1, **changes: Any) -> LoadedModel:
    components = {part: Component(f"{name} {part}", 10 * parameters) for part in ("unet", "vae")}
    info = replace(INFO, name=name, parameters=parameters)
    return LoadedModel(info=info, architecture=f"of {parameters}", components=components, **changes)


def measuring_of(executor: FakeExecutor, **options: Any) -> Measuring:
    options = {"cache": None, "exact": False, "show": lambda _text: None} | options
    return Measuring(executor=executor, num_devices=executor.num_devices, **options)  # type: ignore[arg-type]


def table(executor: FakeExecutor, *models: LoadedModel) -> CostTable:
    measuring = Measuring(
        executor=executor, num_devices=executor.num_devices, cache=None, exact=False, show=lambda _text: None
    )  # type: ignore[arg-type]
    return asyncio.run(measuring.table(models))


def start(
    executor: FakeExecutor, *models: LoadedModel, not_loaded: Sequence[NotLoaded] = (), **options: Any
) -> tuple[list[str], dict[str, str], CostTable]:
    """The models that are served, why the others are not, and the costs."""
    measuring = Measuring(
        executor=executor, num_devices=executor.num_devices, cache=None, exact=False, show=lambda _text: None, **options
    )  # type: ignore[arg-type]
    served, costs = asyncio.run(measuring.start(models, not_loaded, None))
    assert costs.pipelines == tuple(one.info.name for one in served)
    return (
        [one.info.name for one in served],
        {one.info.name: one.reason for one in measuring.not_served.values()},
        costs,
    )


NO_MEMORY = "64x64 cannot run here (MemoryError: no memory)"


def test_a_model_that_cannot_run_is_found_before_anything_is_measured_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = FakeExecutor(broken=frozenset({"broken"}))
    models = model("a"), model("b", parameters=2), model("broken", parameters=3)
    served, not_served, _ = start(executor, *models)
    assert (served, not_served) == (["a", "b"], {"broken": NO_MEMORY})
    assert executor.tried == ["a", "b", *["broken"] * len(SHAPES)], "at each size, as it may run at none"
    assert set(executor.measured) == {"a", "b"}
    assert caplog.messages == [f"broken is not served, and others are: {NO_MEMORY}"]


def test_of_models_that_differ_in_their_weights_alone_one_is_tried_until_one_has_run() -> None:
    executor = FakeExecutor(broken=frozenset({"a"}))
    served, not_served, costs = start(executor, model("a"), model("b"), model("c"))
    assert (served, not_served) == (["b", "c"], {"a": NO_MEMORY})
    assert executor.tried == [*["a"] * len(SHAPES), "b"]
    assert set(executor.measured) == {"b"}
    assert rows(costs, "b") == rows(costs, "c") != []


def test_a_model_whose_largest_stage_has_no_room_is_not_tried() -> None:
    executor = FakeExecutor(weights_bytes=25)
    served, not_served, _ = start(executor, model("a"), model("b", parameters=3))
    assert served == ["a"]
    assert "needs 30 bytes with its weights, and a device has 25; give it more" in not_served["b"]
    assert executor.tried == ["a"]


@pytest.mark.parametrize(("place", "firsts"), [(0, ["cut"]), (1, ["b"])])
def test_a_model_that_could_not_be_loaded_is_not_served_either(place: int, firsts: list[str]) -> None:
    measuring = Measuring(
        executor=FakeExecutor(broken=frozenset({"b"})),  # type: ignore[arg-type]
        num_devices=1,
        cache=None,
        exact=False,
        show=lambda _text: None,
    )
    models = model("b"), model("a", parameters=2)
    served, _ = asyncio.run(measuring.start(models, [NotLoaded(place, "cut", "OSError: no end")], None))
    assert [one.info.name for one in served] == ["a"]
    refused = measuring.not_served
    assert {name: one.reason for name, one in refused.items()} == {
        "cut": "it cannot be loaded (OSError: no end)",
        "b": NO_MEMORY,
    }
    assert [name for name, one in refused.items() if one.is_first] == firsts
    assert (refused["cut"].info, refused["b"].info) == (None, models[0].info)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("b", {}, f"b cannot run here: {NO_MEMORY}"),
        ("bc", {}, f"no model can run here: b: {NO_MEMORY}; c: {NO_MEMORY}"),
        ("ab", {"require_all": True}, f"b cannot run here: {NO_MEMORY}; leave out --require-all to serve the others"),
        (
            "a",
            {"require_all": True, "not_loaded": [NotLoaded(0, "cut", "no end")]},
            "cut cannot run here: it cannot be loaded (no end); leave out --require-all to serve the others",
        ),
        (
            "b",
            {"not_loaded": [NotLoaded(0, "cut", "no end")]},
            f"no model can run here: cut: it cannot be loaded (no end); b: {NO_MEMORY}",
        ),
    ],
    ids=["the only one", "all", "one, and all are required", "one that was not loaded", "and the others"],
)
def test_a_start_fails_if_no_model_runs_or_if_all_are_required(
    names: str, options: dict[str, Any], message: str
) -> None:
    executor = FakeExecutor(broken=frozenset("bc"))
    with pytest.raises(WorkerStartFailed) as raised:
        start(executor, *(model(name, parameters=place) for place, name in enumerate(names, 1)), **options)
    assert str(raised.value) == message
    assert not executor.measured


def limited(executor: FakeExecutor, most_s: float, *models: LoadedModel) -> tuple[Measuring, CostTable, list[str]]:
    """A start that may measure for so long, the costs, and what it shows."""
    said: list[str] = []
    measuring = Measuring(
        executor=executor,  # type: ignore[arg-type]
        num_devices=executor.num_devices,
        cache=None,
        exact=False,
        show=said.append,
        most_s=most_s,
        now_s=lambda: executor.now_s,
    )
    _, costs = asyncio.run(measuring.start(models, (), None))
    return measuring, costs, said


def steps(costs: CostTable, pipeline: str) -> list[tuple[int, float, bool]]:
    """Sides, seconds relative to a pixel, and whether that is predicted."""
    found = [row for row in costs.rows if (row.pipeline, row.stage, row.degree) == (pipeline, DIFFUSE, 1)]
    return sorted((row.height, round(row.seconds * 1e6 / row.shape.pixels, 1), row.is_predicted) for row in found)


def test_a_start_measures_the_smallest_size_of_each_model_first_and_predicts_what_it_has_no_time_for() -> None:
    executor = FakeExecutor()
    models = [model(name, parameters=place) for place, name in enumerate("abc", 1)]
    measuring, costs, said = limited(executor, 5.2, *models)
    assert executor.measured == ["a", "b", "c", "a", "a"]
    assert steps(costs, "a") == [(64, 1.0, False), (128, 1.0, False), (192, 1.0, False)]
    assert steps(costs, "b") == [(64, 1.0, False), (128, 2.0, True), (192, 2.0, True)]
    assert [(one.info.name, [str(*batch) for batch, _ in each.missing]) for one, each in measuring.left] == [
        (name, ["128x128", "192x192"]) for name in "bc"
    ]
    assert said[-1] == "c: measuring the cost of steps here, 1 of 3"


def test_a_start_that_may_not_measure_predicts_by_the_trials() -> None:
    executor = FakeExecutor(num_devices=2)
    measuring, costs, _ = limited(executor, 0, model("a"))
    assert executor.measured == []
    assert steps(costs, "a") == [(64, 1.0, True), (128, 2.0, True), (192, 2.0, True)]
    assert {row.degree for row in costs.rows} == {1}, "nothing is known of several devices"
    assert len(measuring.left[0][1].missing) == 6


def test_a_clip_of_few_frames_is_tried_and_its_time_says_what_the_default_length_takes() -> None:
    info = replace(INFO, default_frames=81, frame_multiple=4, max_frames=81)
    assert trial_shapes(info) == (Shape(64, 64, 5), *calibration_shapes(info))
    measurer = FakeMeasurer(info=info)
    tried = asyncio.run(warm_up(measurer, info))
    assert measurer.asked == [((Shape(64, 64, 5),), 1, 0)]
    costs = ModelCosts.of(measurer, info, (1,), None, with_batches=False, tried=tried)
    predicted = costs.table()
    assert predicted is not None
    (base,) = (row for row in tried if row.stage == DIFFUSE)
    seconds = [row.seconds / base.seconds for row in predicted.rows if row.stage == DIFFUSE]
    assert sorted(seconds) == pytest.approx([2 * 21 / 2 * size for size in (1, 4, 9)]), "21 frames of latents for 2"


def test_what_would_end_after_the_limit_is_not_begun_and_the_start_says_how_long_all_takes() -> None:
    executor = FakeExecutor(slow=1000)
    _, costs, said = limited(executor, 60, model("a"))
    assert [is_predicted for _, _, is_predicted in steps(costs, "a")] == [False, True, True]
    assert (
        "measuring the cost of steps here takes about 688 s: it ends after at most 60 s, and the rest is measured "
        "when devices are idle"
    ) in said


def test_what_loras_cost_is_not_measured_after_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    loras = {"x": Lora(changes=frozenset({"unet"}), component=Component("x", 1))}
    executor = FakeExecutor()
    _, costs, _ = limited(executor, 4, model("a", loras=loras))
    assert costs.loras["a"]["x"].slowdown == 1.0
    assert executor.measured == ["a"] * 3
    assert caplog.messages == ["a: the cost of its LoRAs is not measured; steps with them are predicted as without"]


def test_what_is_predicted_is_measured_by_the_next_start(tmp_path: Path) -> None:
    executor, cache = FakeExecutor(), CostCache(Profiles(tmp_path / "costs.sqlite"))
    for most_s, measured, is_predicted in ((1.5, 2, True), (9, 3, False), (9, 3, False)):
        measuring = Measuring(
            executor=executor,  # type: ignore[arg-type]
            num_devices=executor.num_devices,
            cache=cache,
            exact=False,
            show=lambda _text: None,
            most_s=most_s,
            now_s=lambda: executor.now_s,
        )
        _, costs = asyncio.run(measuring.start([model("a")], (), None))
        assert (len(executor.measured), any(row.is_predicted for row in costs.rows)) == (measured, is_predicted)


def rows(costs: CostTable, pipeline: str) -> list[CostRow]:
    return [replace(row, pipeline="") for row in costs.rows if row.pipeline == pipeline]


def test_of_models_that_differ_in_their_weights_alone_the_first_is_measured() -> None:
    executor = FakeExecutor()
    costs = table(executor, model("a"), model("b"), model("larger", parameters=2))
    assert set(executor.measured) == {"a", "larger"}
    assert rows(costs, "a") == rows(costs, "b") != []
    assert rows(costs, "larger")


@pytest.mark.parametrize("weights_bytes", [None, 100], ids=["all weights stay", "loaded on demand"])
@pytest.mark.parametrize("known", [{}, {LoadSource.HOST: 5.0}, {LoadSource.DISK: 3.0}], ids=["none", "host", "disk"])
def test_how_fast_weights_are_loaded_is_measured_if_a_given_table_does_not_say(
    known: dict[LoadSource, float], weights_bytes: int | None
) -> None:
    executor = FakeExecutor(weights_bytes=weights_bytes)
    given, models = replace(table(FakeExecutor(), model("a")), load_bytes_per_s=known), [model("a"), model("b")]
    measuring = Measuring(
        executor=executor, num_devices=executor.num_devices, cache=None, exact=False, show=lambda _text: None
    )  # type: ignore[arg-type]
    completed = asyncio.run(measuring.completed(given, models))
    is_measured = weights_bytes is not None and LoadSource.DISK not in known
    assert executor.measured == (["a", "b"] if is_measured else [])
    assert completed == replace(given, load_bytes_per_s={LoadSource.DISK: 1e9, **known} if is_measured else known)


def test_a_stage_that_several_models_have_is_measured_once() -> None:
    executor = FakeExecutor(num_devices=2)
    first = model("a", stage_keys={ENCODE: "1", DIFFUSE: "2", DECODE: "3"})
    some = model("b", parameters=2, stage_keys={ENCODE: "1", DIFFUSE: "2", DECODE: "4"})
    whole = model("c", parameters=3, stage_keys={ENCODE: "1", DIFFUSE: "2", DECODE: "4"})
    costs = table(executor, first, some, whole)
    assert {stage for name, stage in executor.timed if name == "b"} == {DECODE}, "what it shares is not timed"
    degrees = {(row.stage, row.degree) for row in costs.rows if row.pipeline == "c"}
    assert {(DIFFUSE, 1), (DIFFUSE, 2), (DECODE, 1)} <= degrees
    assert set(rows(costs, "c")) == set(rows(costs, "b"))
    shared = [[row for row in rows(costs, name) if row.stage != DECODE] for name in "ab"]
    assert set(shared[0]) == set(shared[1]) != set()
    renamed, known = model("d", parameters=4, stage_keys={"other": "2"}), SimpleNamespace(measured=costs.rows)
    assert {row.stage for row in _shared(renamed, [(first, known)])} == {"other"}  # type: ignore[list-item]


def test_how_much_longer_steps_with_a_lora_take_is_measured() -> None:
    loras = {
        name: Lora(changes=frozenset({"unet"}), component=Component(name, size)) for name, size in (("x", 1), ("y", 2))
    }
    executor = FakeExecutor()
    costs = table(executor, model("a"), model("b", loras=loras))
    assert [one.slowdown for one in costs.loras["b"].values()] == pytest.approx([SLOWER, SLOWER])
    assert "a" not in costs.loras
    resident = with_weights(costs, [model("a"), model("b", loras=loras)], None)
    assert {one.component for one in resident.loras["b"].values()} == {None}, "all devices always have them"
    assert not resident.components
    other = replace(costs, loras={"b": {"x": replace(loras["x"], component=None, slowdown=3.0)}})
    given = with_weights(other, [model("b", loras=loras)], 100).loras["b"]
    assert {name: (one.slowdown, one.component) for name, one in given.items()} == {
        "x": (3.0, Component("x", 1)),
        "y": (1.0, Component("y", 2)),
    }, "a given table says how slow LoRAs are, and not which there are"
    on_demand = with_weights(costs, [model("a"), model("b", loras=loras)], 100, 1000)
    assert on_demand.loras["b"]["x"].component == Component("x", 1)
    assert on_demand.components["a"]["vae"] == Component("a vae", 10)


def test_the_costs_of_an_added_model_are_those_of_one_like_it() -> None:
    executor = FakeExecutor(weights_bytes=100)
    first, like, other = model("a"), model("b"), model("c", parameters=3)
    costs = with_weights(table(executor, first), [first], 100)
    measuring = Measuring(
        executor=executor, num_devices=executor.num_devices, cache=None, exact=False, show=lambda _text: None
    )  # type: ignore[arg-type]
    part = measuring.known(like, [first], costs)
    assert part is not None
    assert rows(part, "b") == rows(costs, "a")
    assert (set(part.components), part.memory_bytes) == ({"b"}, costs.memory_bytes)
    assert measuring.known(other, [first], costs) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_how_fast_weights_are_loaded_is_measured_with_the_first_model_that_has_some(is_known: bool) -> None:
    executor = FakeExecutor(weights_bytes=100)
    functions, first = replace(model("functions"), components={}), model("a", parameters=2)
    costs = replace(with_weights(table(executor, functions), [functions], 100), load_bytes_per_s={})
    measuring = Measuring(
        executor=executor, num_devices=executor.num_devices, cache=None, exact=False, show=lambda _text: None
    )  # type: ignore[arg-type]
    known = table(FakeExecutor(), first) if is_known else None
    executor.timed.clear()
    assert measuring.lacks_speeds(costs, first)
    assert not measuring.lacks_speeds(costs, functions)
    part = measuring.part(costs, first, asyncio.run(measuring.added(first, known, measuring._measurer(first))))
    assert part.load_bytes_per_s == {LoadSource.DISK: 1e9}
    assert bool(executor.timed) is not is_known, "what is known is not timed again"
    assert not measuring.lacks_speeds(part, model("b", parameters=3))
