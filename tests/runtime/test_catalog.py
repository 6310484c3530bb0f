"""Changes of what is served: whole or not at all, whatever was measured under their names before, and time after time.

With real models: `live/test_catalog.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from clock import LeapingLoop, ManualLoop, run, sleep
from fake_engine import INFO
from runtime.fake_measurer import INFO as TOY
from runtime.fake_measurer import KEY, SHAPES, FakeExecutor, FakeMeasurer
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Measure
from tilework.core.component import Component
from tilework.core.cost_row import CostRow
from tilework.core.events import DeviceJoined, Event, ModelServed
from tilework.core.graph.stage import StageSpec
from tilework.core.lora import Lora, UsedLora
from tilework.core.model import LoraSource, ModelSource, NewModel, NotServed
from tilework.core.wire.reports import LoadedModel
from tilework.core.work import Group
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin
from tilework.cost.profiles import Profiles
from tilework.runtime.executor import ModelRefused
from tilework.runtime.models.catalog import Catalog
from tilework.runtime.models.costs import CostCache
from tilework.runtime.models.measuring import Measuring, with_weights
from tilework.runtime.models.turns import DeviceTurns

CHANGES: dict[str, Callable[[Catalog], Awaitable[object]]] = {
    "remove": lambda catalog: catalog.remove("other"),
    "add_lora": lambda catalog: catalog.add_lora("other", LoraSource("wool", "wool.safetensors")),
    "remove_lora": lambda catalog: catalog.remove_lora("other", "ink"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_model_that_went_while_it_waited_is_refused(name: str) -> None:
    """One change is made at a time: the second one waits until no request for the model is open."""
    open_requests = [Mock(pipeline="other")]
    models = {one: replace(INFO, name=one, loras=("ink",)) for one in ("first", "other", "third")}
    anything = Mock(weights_bytes=1)
    catalog = Catalog(
        infos=models,
        loaded=[],
        executor=anything,
        usual=ModelSource(path="first"),
        controller=anything,
        measuring=anything,
        handle=anything,
        requests=lambda: open_requests,
        turns=anything,
    )

    async def scenario(loop: ManualLoop) -> None:
        going = asyncio.create_task(catalog.remove("other"))
        changing = asyncio.ensure_future(CHANGES[name](catalog))
        await loop.until(lambda: "other" not in catalog.infos)
        open_requests.clear()
        loop.advance(1)
        await going
        with pytest.raises(ModelRefused, match="other is no longer served"):
            await changing

    run(scenario)
    assert list(catalog.infos) == ["first", "third"]


EXPORT = StageSpec(name="export", inputs=("picture",), outputs=("video",))


@dataclass
class Files(FakeExecutor):
    """Reads models by their paths, and keeps what workers were told."""

    files: dict[str, LoadedModel] = field(default_factory=dict)
    served: dict[str, LoadedModel] = field(default_factory=dict)
    loras: list[tuple[str, str]] = field(default_factory=list)
    refuses: str = ""

    def profile_key(self, model: str) -> ProfileKey:
        return replace(KEY, architecture=self.served[model].architecture)

    async def calibrate(
        self,
        model: str,
        batches: Any,
        degree: int = 1,
        num_runs: int | None = None,
        loras: Sequence[Any] = (),
        known: frozenset[str] = frozenset(),
        devices: Group | None = None,
    ) -> tuple[CostRow, ...]:
        (self.tried if num_runs == 0 else self.measured).append(model)
        return await self.measurer(self.served[model].info).calibrate(batches, degree, num_runs, known=known)

    async def read_model(self, source: ModelSource, served: Collection[str]) -> LoadedModel:
        found = self.files[source.path]
        model = replace(found, info=replace(found.info, name=source.name or found.info.name))
        if model.info.name in served:
            raise ModelRefused(f"{model.info.name} is served already")
        self.served[model.info.name] = model
        return model

    async def add_model(self, source: ModelSource) -> None:
        if self.refuses:
            raise ModelRefused(self.refuses)

    def remove_model(self, model: str) -> None:
        del self.served[model]

    async def add_lora(self, model: str, lora: LoraSource) -> Lora:
        self.loras.append((model, lora.name))
        return Lora(changes=frozenset({"unet"}), component=Component(f"{model} {lora.name}", 3))

    def remove_lora(self, model: str, name: str) -> None:
        self.loras.remove((model, name))


def loaded(identity: str, parameters: int, *more: StageSpec) -> LoadedModel:
    components = {part: Component(f"{identity} {part}", 10) for part in ("unet", "vae")}
    info = replace(TOY, name=identity, parameters=parameters, stages=(*TOY.stages, *more))
    return LoadedModel(info=info, identity=identity, architecture=identity, components=components)


class Server:
    """A catalog over a real controller, on files `a`, `b` and `clips`, of three architectures; it begins with `a`."""

    def __init__(self, place: Path, *names: str) -> None:
        files = {"a": loaded("a", 1), "b": loaded("b", 2), "clips": loaded("clips", 3, EXPORT)}
        self.executor = Files(weights_bytes=1000, files=files)
        self.events: list[Event] = []
        self.turns = DeviceTurns(self.handle, lambda: None)
        self.place, self.names = place, names or ("a",)
        self.most_s = math.inf
        self.is_busy = False

    async def start(self) -> Catalog:
        executor: Any = self.executor
        loaded = [await self.executor.read_model(ModelSource(path=one, name=one), ()) for one in self.names]
        measuring = Measuring(
            executor=executor,
            num_devices=1,
            cache=CostCache(Profiles(self.place)),
            exact=False,
            show=lambda _text: None,
            most_s=self.most_s,
            now_s=lambda: 0.0,
        )
        served, costs = await measuring.start(loaded, (), None)
        table = with_weights(costs, served, self.executor.weights_bytes)
        self.controller = Controller(ControllerConfig(), table)
        self.catalog = Catalog(
            infos={one.info.name: one.info for one in loaded},
            loaded=loaded,
            executor=executor,
            usual=ModelSource(path=""),
            controller=self.controller,
            measuring=measuring,
            handle=self.handle,
            requests=tuple,
            turns=self.turns,
        )
        self.controller.handle(DeviceJoined(0, 0, memory_bytes=self.executor.weights_bytes), 0)
        return self.catalog

    def handle(self, event: Event) -> None:
        self.events.append(event)
        for action in self.controller.handle(event, len(self.events)):
            if isinstance(action, Measure) and not self.is_busy:
                self.turns.begin(action)

    @property
    def pipelines(self) -> set[str]:
        return set(self.controller.costs.table.pipelines)


def earlier(place: Path, model: LoadedModel, *names: str) -> None:
    """Save what earlier servers measured of a model, under these names."""

    async def measure(name: str) -> tuple[CostRow, ...]:
        info = replace(model.info, name=name)
        shapes = tuple((shape,) for shape in SHAPES)
        return await FakeMeasurer(info=info).calibrate(shapes)

    key = replace(KEY, architecture=model.architecture)
    for at, name in enumerate(names):
        rows = asyncio.run(measure(name))
        saved = Profile(key=key, origin=ProfileOrigin.CALIBRATION, rows=rows, tilework="0", created_unix_ns=at)
        Profiles(place).save(saved)


def test_what_was_measured_under_the_name_of_a_served_model_is_not_taken_for_it(tmp_path: Path) -> None:
    server = Server(tmp_path / "costs.sqlite")
    earlier(tmp_path / "costs.sqlite", server.executor.files["b"], "a", "b")

    async def scenario() -> None:
        catalog = await server.start()
        before = server.controller.costs.table
        await catalog.add(NewModel(path="b", name="other"), measure=False)
        assert server.pipelines == {"a", "other"}
        await catalog.remove("other")
        assert server.controller.costs.table == before, "with all components"

    asyncio.run(scenario())


def test_rows_of_stages_that_a_model_lacks_by_now_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "costs.sqlite")
    plain = server.executor.files["clips"]
    earlier(tmp_path / "costs.sqlite", plain, "clips")
    server.executor.files["clips"] = replace(plain, info=replace(plain.info, stages=TOY.stages))

    async def scenario() -> None:
        catalog = await server.start()
        await catalog.add(NewModel(path="clips"), measure=False)
        assert {row.stage for row in server.controller.costs.table.rows} == {one.name for one in TOY.stages}

    asyncio.run(scenario())
    assert "clips: 3 rows of the cost cache are not used; export is no stage of it" in caplog.text


def test_two_models_that_swap_their_names_between_two_starts_keep_their_costs(tmp_path: Path) -> None:
    async def scenario(server: Server) -> dict[str, float]:
        await server.start()
        rows = server.controller.costs.table.rows
        return {row.pipeline: row.seconds for row in rows if row.stage == TOY.stages[0].name}

    first, second = Server(tmp_path / "costs.sqlite", "a", "b"), Server(tmp_path / "costs.sqlite", "a", "b")
    before = asyncio.run(scenario(first))
    files = second.executor.files
    second.executor.files = {"a": files["b"], "b": files["a"]}
    after = asyncio.run(scenario(second))
    assert (after["a"], after["b"]) == (before["b"], before["a"])
    assert second.executor.measured == [], "neither is measured again"


def test_names_are_checked_while_no_other_change_is_made(tmp_path: Path) -> None:
    """With the name that is asked for, and with that which the files give; a refusal ends the change as a whole."""
    server = Server(tmp_path / "costs.sqlite")
    earlier(tmp_path / "costs.sqlite", server.executor.files["b"], "b")
    checked: list[tuple[str, bool]] = []

    async def scenario() -> None:
        catalog = await server.start()

        def check(name: str) -> None:
            checked.append((name, catalog._lock.locked()))
            if name == "b":
                raise ModelRefused("it is the alias of a")

        with pytest.raises(ModelRefused, match="alias of a"):
            await catalog.add(NewModel(path="b"), measure=False, check_name=check)
        assert list(catalog.infos) == list(server.executor.served) == ["a"]
        await catalog.add(NewModel(path="b", name="c"), measure=False, check_name=check)
        assert checked == [("", True), ("b", True), ("c", True), ("c", True)]

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["workers refuse", "cannot run", "costs cannot be used"])
def test_a_change_that_fails_changes_nothing(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path / "costs.sqlite")

    async def scenario() -> None:
        catalog = await server.start()
        before = server.controller.costs.table, dict(catalog.infos), dict(server.executor.served)
        with monkeypatch.context() as broken:
            if fault == "workers refuse":
                server.executor.refuses = "the files are damaged"
            elif fault == "cannot run":
                server.executor.broken = frozenset("b")
            else:
                broken.setattr("tilework.cost.table_costs.TableCosts.served", Mock(side_effect=KeyError("bug")))
                with pytest.raises(ModelRefused, match="the costs of requests for a cannot be used: 'bug'"):
                    await catalog.add_lora("a", LoraSource("ink", "/ink.safetensors"))
            with pytest.raises(
                ModelRefused,
                match=r"damaged|b cannot run here: 64x64 |the costs of requests for b cannot be used: 'bug'",
            ):
                await catalog.add(NewModel(path="b"), measure=True)
        assert fault == "costs cannot be used" or "b" not in server.executor.measured, "it was only tried"
        server.executor.refuses, server.executor.broken = "", frozenset()
        catalog.not_served["b"] = NotServed(name="b", info=INFO, reason="no memory", is_first=False)
        assert (server.controller.costs.table, catalog.infos, server.executor.served) == before
        assert not server.executor.loras
        assert not any(isinstance(event, ModelServed) for event in server.events)
        await catalog.add(NewModel(path="b"), measure=True)
        await catalog.add_lora("b", LoraSource("ink", "/ink.safetensors"))
        assert list(catalog.infos) == ["a", "b"]
        assert not catalog.not_served

    asyncio.run(scenario())


def test_a_removal_that_is_given_up_leaves_the_model_where_it_was(tmp_path: Path) -> None:
    server = Server(tmp_path / "costs.sqlite", "a", "b")

    async def scenario() -> None:
        catalog = await server.start()
        await catalog.add_lora("a", LoraSource("ink", "/ink.safetensors"))
        before = dict(catalog.infos)
        catalog.requests = lambda: [Mock(pipeline="a", loras=[UsedLora("ink", 1.0)])]
        for change in (catalog.remove("a"), catalog.remove_lora("a", "ink")):
            going = asyncio.ensure_future(change)
            await asyncio.sleep(0)
            going.cancel()
            await asyncio.wait([going])
            assert list(catalog.infos.items()) == list(before.items()), "the first model is still the first"

    asyncio.run(scenario())


def test_hundreds_of_changes_leave_what_one_leaves(tmp_path: Path) -> None:
    server = Server(tmp_path / "costs.sqlite")

    async def change(catalog: Catalog) -> None:
        await catalog.add_lora("a", LoraSource("ink", "/ink.safetensors"))
        await catalog.remove_lora("a", "ink")
        for name in ("b", "clips"):
            await catalog.add(NewModel(path=name), measure=True)
            await catalog.remove(name)

    async def scenario() -> None:
        catalog = await server.start()
        await change(catalog)
        first, size = server.controller.costs.table, tmp_path.joinpath("costs.sqlite").stat().st_size
        served = [event for event in server.events if isinstance(event, ModelServed)]
        for _ in range(100):
            await change(catalog)
        assert server.controller.costs.table == first
        again = [event for event in server.events if isinstance(event, ModelServed)][-len(served) :]
        assert again == served, "an event of the hundredth change is that of the first"
        assert tmp_path.joinpath("costs.sqlite").stat().st_size == size
        assert list(server.executor.served) == ["a"]

    asyncio.run(scenario())


def predicted(server: Server) -> dict[str, int]:
    """How many rows of each model are predicted."""
    rows = server.controller.costs.table.rows
    return {name: sum(row.is_predicted for row in rows if row.pipeline == name) for name in sorted(server.pipelines)}


def leaping(scenario: Awaitable[None]) -> None:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(scenario)  # type: ignore[arg-type]


def test_what_a_start_has_left_is_measured_on_idle_devices_for_all_models_of_an_architecture(tmp_path: Path) -> None:
    server = Server(tmp_path / "costs.sqlite", "a", "like", "b")
    server.most_s = 0
    server.executor.files["like"] = replace(loaded("like", 1), architecture="a")

    async def scenario() -> None:
        catalog = await server.start()
        everything = 3 * len(TOY.stages)
        assert predicted(server) == dict.fromkeys(("a", "b", "like"), everything)
        server.is_busy = True
        measuring = asyncio.ensure_future(catalog.measure_left())
        await sleep(1000)
        assert predicted(server) == dict.fromkeys(("a", "b", "like"), everything)
        assert not catalog.measuring.left[0][1].measured, "requests have the devices"
        server.is_busy = False
        await measuring
        assert predicted(server) == dict.fromkeys(("a", "b", "like"), 0)
        assert sorted(server.executor.measured) == ["a"] * 3 + ["b"] * 3

    leaping(scenario())
    again = Server(tmp_path / "costs.sqlite", "a", "b")
    asyncio.run(again.start())
    assert not again.executor.measured, "it was saved"


def test_what_is_left_of_a_model_that_has_gone_is_not_measured(tmp_path: Path) -> None:
    server = Server(tmp_path / "costs.sqlite", "a", "b")
    server.most_s = 0

    async def scenario() -> None:
        catalog = await server.start()
        await catalog.remove("b")
        await catalog.measure_left()
        assert set(server.executor.measured) == {"a"}
        assert server.pipelines == {"a"}

    leaping(scenario())


def test_what_takes_minutes_to_measure_is_not_measured_beside_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "costs.sqlite", "a")
    server.most_s, server.executor.slow = 0, 1000

    async def scenario() -> None:
        catalog = await server.start()
        await catalog.measure_left()
        assert predicted(server) == {"a": 2 * len(TOY.stages)}
        assert server.executor.measured == ["a"]

    leaping(scenario())
    (line,) = caplog.messages
    assert line.startswith("a: 2 of 3 measurements take more than 60 s (639 s together), too long beside requests")
