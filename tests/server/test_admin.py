"""The routes that change what is served: who may, what they accept, and what they pass on."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import INFO, FakeEngine, Plan, Served, serving
from tilework.core.model import LoraSource, ModelInfo, NewModel, NotServed
from tilework.runtime.executor import ModelRefused
from tilework.server.config import ConfigError, ServerConfig
from tilework.server.main import CLOSE_S
from tilework.server.tenants import load_tenants
from waiting import PATIENCE_S, eventually

ADMIN = {"Authorization": "Bearer admin-key"}


@dataclass
class FakeCatalog:
    """Changes the models of a fake engine, and keeps what it was asked for."""

    engine: FakeEngine
    asked: list[Any] = field(default_factory=list)
    refusal: str = ""
    found: str = "found"
    num_waiting: int = 0
    reading: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add(self, new: NewModel, *, measure: bool, check_name: Callable[[str], object]) -> ModelInfo:
        """A model without a name is called as its files say: `found`."""
        self.num_waiting += self.lock.locked()
        async with self.lock:
            check_name(new.name)
            self.asked.append((new, measure))
            await self.reading()
            if self.refusal:
                raise ModelRefused(self.refusal)
            name = new.name or self.found
            check_name(name)
            self.engine.others += (replace(INFO, name=name, loras=tuple(one.name for one in new.loras)),)
            return self.engine.others[-1]

    async def remove(self, name: str) -> None:
        self.engine.others = tuple(one for one in self.engine.others if one.name != name)

    async def add_lora(self, model: str, source: LoraSource) -> None:
        self.asked.append(source)
        if self.refusal:
            raise ModelRefused(self.refusal)
        self._change_loras(model, lambda loras: (*loras, source.name))

    async def remove_lora(self, model: str, name: str) -> None:
        self._change_loras(model, lambda loras: tuple(one for one in loras if one != name))

    def _change_loras(self, model: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> None:
        def changed(one: ModelInfo) -> ModelInfo:
            return replace(one, loras=change(one.loras)) if one.name == model else one

        self.engine.info, self.engine.others = changed(self.engine.info), tuple(map(changed, self.engine.others))


class Gate:
    """A safety filter that takes its time."""

    is_asked, may_answer = threading.Event(), threading.Event()

    def refuse_texts(self, _texts: object) -> None:
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_S)

    def refuse_picture(self, _picture: object) -> None: ...


def start(**settings: Any) -> AbstractContextManager[Served]:
    engine = FakeEngine()
    engine.catalog = FakeCatalog(engine)
    return serving(engine, admin_key="admin-key", **settings)


@pytest.fixture
def server() -> Iterator[Served]:
    with start() as served:
        yield served


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    """For requests that are refused: they leave nothing behind."""
    with start() as served:
        yield served


def add(server: Served, **fields: object) -> httpx.Response:
    return server.http.post("/v1/admin/models", json=fields, headers=ADMIN)


def test_a_model_comes_with_its_names_and_deadline_and_goes(server: Served, tmp_path: Path) -> None:
    (tmp_path / "ink.safetensors").touch()
    answer = add(
        server, path="./sdxl", name="sdxl", loras=str(tmp_path), aliases=["xl"], default_slo="9s", measure=True
    )
    assert answer.status_code == 201, answer.text
    assert (answer.json()["id"], answer.json()["tilework"]["aliases"]) == ("sdxl", ["xl"])
    assert server.engine.catalog.asked == [
        (NewModel(path="./sdxl", name="sdxl", loras=(LoraSource("ink", str(tmp_path / "ink.safetensors")),)), True)
    ]
    assert server.http.post("/v1/images/generations", json={"prompt": "x", "model": "xl"}).status_code == 200
    assert server.engine.requests[-1].pipeline == "sdxl"
    assert server.engine.requests[-1].deadline_ns is not None
    gone = server.http.delete("/v1/admin/models/xl?confirm=xl", headers=ADMIN)
    assert gone.json() == {"id": "sdxl", "object": "model", "deleted": True}
    assert server.http.get("/v1/models/sdxl").status_code == 404
    assert server.http.get("/v1/models/xl").status_code == 404


def test_a_lora_comes_and_goes(server: Served) -> None:
    place = f"/v1/admin/models/{INFO.name}/loras"
    answer = server.http.post(place, json={"name": "ink", "path": "/ink.safetensors"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["tilework"]["loras"]) == (201, ["ink"])
    assert server.engine.catalog.asked == [LoraSource("ink", "/ink.safetensors")]
    ask = {"prompt": "x", "lora": [{"name": "ink", "scale": 0.5}]}
    assert server.http.post("/v1/images/generations", json=ask).status_code == 200
    assert [one.scale for one in server.engine.requests[-1].loras] == [0.5]
    assert server.http.delete(f"{place}/chalk", headers=ADMIN).status_code == 404
    assert server.http.delete(f"{place}/ink", headers=ADMIN).json()["tilework"]["loras"] == []
    assert server.http.post("/v1/images/generations", json=ask).json()["error"]["code"] == "unknown_lora"


@contextmanager
def restarted(
    state: Path, refusal: str = "", models: tuple[ModelInfo, ...] = (INFO,), broken: tuple[ModelInfo, ...] = ()
) -> Iterator[Served]:
    """The next start of a durable server, with these models, and with broken ones that cannot run."""
    not_served = {one.name: NotServed(name=one.name, info=one, reason="no memory", is_first=False) for one in broken}
    engine = FakeEngine(info=models[0], others=models[1:], not_served=not_served)
    engine.catalog = FakeCatalog(engine, refusal=refusal)
    with serving(engine, admin_key="admin-key", durable=str(state), drain_s=0.1) as served:
        yield served


@pytest.fixture
def left(tmp_path: Path) -> tuple[Path, str]:
    """What a durable server leaves that is killed after a model and LoRAs came and went, and an open call of it."""
    (tmp_path / "sdxl").mkdir()
    place, later = f"/v1/admin/models/{INFO.name}/loras", {"Prefer": "respond-async"}
    engine = FakeEngine(plan=Plan(is_held=True))
    engine.catalog = FakeCatalog(engine)
    with serving(engine, admin_key="admin-key", durable=str(tmp_path / "state"), drain_s=0.1) as server:
        for name in ("sdxl", "short"):
            made = add(server, path=str(tmp_path / "sdxl"), name=name, aliases=[f"{name}-xl"], default_slo="9s")
            assert made.status_code == 201
        for name in ("ink", "wool"):
            server.http.post(place, json={"name": name, "path": f"/{name}.safetensors"}, headers=ADMIN)
        assert server.http.delete("/v1/admin/models/short?confirm=short", headers=ADMIN).status_code == 200
        assert server.http.delete(f"{place}/ink", headers=ADMIN).status_code == 200
        ask = {"prompt": "x", "model": "sdxl-xl"}
        uid = server.http.post("/v1/images/generations", json=ask, headers=later).json()["uid"]
        shutil.copytree(tmp_path / "state", tmp_path / "killed")
    return tmp_path / "killed", uid


def test_what_was_added_is_served_again_by_the_next_start(left: tuple[Path, str]) -> None:
    state, uid = left
    with restarted(state) as server:
        (first, measure), *others = server.engine.catalog.asked
        assert (first.name, Path(first.path).name, measure) == ("sdxl", "sdxl", True)
        assert others == [LoraSource("wool", "/wool.safetensors")], "what was removed stays removed"
        card = server.http.get("/v1/models/sdxl").json()
        assert card["tilework"]["aliases"] == ["sdxl-xl"]
        eventually(lambda: server.http.get(f"/v1/requests/{uid}").json()["status"] == "done")
        assert server.http.post("/v1/images/generations", json={"prompt": "x", "model": "sdxl-xl"}).status_code == 200
        assert server.engine.requests[-1].deadline_ns is not None


def test_loras_of_an_added_model_are_as_they_were_left(tmp_path: Path) -> None:
    """They come with the directory of their model, and then come and go like others; the directory counts no more."""
    place, state, later = "/v1/admin/models/sdxl/loras", tmp_path / "state", {"Prefer": "respond-async"}
    for name in ("ink", "wool", "chalk"):
        (tmp_path / f"{name}.safetensors").touch()

    def loras(server: Served) -> Any:
        return server.http.get("/v1/models/sdxl").json()["tilework"]["loras"]

    with restarted(state) as server:
        server.engine.plan = Plan(is_held=True)
        assert add(server, path=str(tmp_path), name="sdxl", loras=str(tmp_path)).status_code == 201
        for name in ("ink", "wool"):
            assert server.http.delete(f"{place}/{name}", headers=ADMIN).status_code == 200
        server.http.post(place, json={"name": "ink", "path": "/new.safetensors"}, headers=ADMIN)
        assert sorted(loras(server)) == ["chalk", "ink"]
        ask = {"prompt": "x", "model": "sdxl", "lora": [{"name": "ink", "scale": 1}]}
        uid = server.http.post("/v1/images/generations", json=ask, headers=later).json()["uid"]
        shutil.copytree(state, tmp_path / "killed")
    with restarted(tmp_path / "killed") as server:
        (model, _measure), chalk, ink = server.engine.catalog.asked
        assert (model.loras, chalk.name) == ((), "chalk")
        assert ink == LoraSource("ink", "/new.safetensors")
        assert sorted(loras(server)) == ["chalk", "ink"]
        (wanted, _) = server.engine.restored[0]
        assert (wanted.uid, wanted.spec.loras[0].name) == (f"{uid}-0", "ink")


def test_what_a_server_is_started_with_takes_the_place_of_what_was_added(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "wool.safetensors").touch()
    with restarted(state) as server:
        ink = {"name": "ink", "path": "/ink.safetensors"}
        server.http.post(f"/v1/admin/models/{INFO.name}/loras", json=ink, headers=ADMIN)
        assert add(server, path=str(tmp_path), name="sdxl", loras=str(tmp_path)).status_code == 201
    with restarted(state, models=(replace(INFO, loras=("ink",)), replace(INFO, name="sdxl"))) as server:
        assert server.engine.catalog.asked == []
        gone = server.http.delete(f"/v1/admin/models/{INFO.name}/loras/ink", headers=ADMIN)
        assert gone.json()["tilework"]["loras"] == []
    with restarted(state, broken=(replace(INFO, name="sdxl"),)) as server:
        assert server.engine.catalog.asked == [], "also if it cannot run"


def test_a_model_that_comes_again_has_no_loras_of_its_former_life(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "wool.safetensors").touch()
    with restarted(state) as server:
        assert add(server, path=str(tmp_path), name="sdxl", loras=str(tmp_path)).status_code == 201
    with restarted(state, refusal="no such directory") as server:
        server.engine.catalog.refusal = ""
        assert add(server, path=str(tmp_path), name="sdxl").status_code == 201
    with restarted(state) as server:
        (only,) = server.engine.catalog.asked
        assert only[0].name == "sdxl"


def test_a_lora_that_is_gone_can_be_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, place = tmp_path / "state", f"/v1/admin/models/{INFO.name}/loras"
    with restarted(state) as server:
        server.http.post(place, json={"name": "ink", "path": "/ink.safetensors"}, headers=ADMIN)
    with restarted(state, refusal="no such file") as server:
        assert f"the LoRA ink of {INFO.name} was added to the server before this start" in caplog.text
        assert server.http.delete(f"{place}/ink", headers=ADMIN).status_code == 200
        assert server.http.delete(f"{place}/ink", headers=ADMIN).status_code == 404
    with restarted(state) as server:
        assert server.engine.catalog.asked == []


def test_calls_of_what_cannot_be_served_again_fail_and_the_server_starts(
    left: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    state, uid = left
    with restarted(state, refusal="its files are damaged") as server:
        assert "the model sdxl was added to the server before this start, and cannot be served again" in caplog.text
        assert "its files are damaged" in caplog.text
        ended = server.http.get(f"/v1/requests/{uid}").json()
        assert ended["status"] == "failed"
        assert "the model sdxl is not served any more" in str(ended)
        assert server.http.post("/v1/images/generations", json={"prompt": "x"}).status_code == 200
    with restarted(state) as server:
        assert "sdxl" in server.engine.models, "the files may have been repaired"
    with restarted(state, refusal="its files are damaged") as server:
        removed = server.http.delete("/v1/admin/models/sdxl?confirm=sdxl", headers=ADMIN)
        assert (removed.status_code, "the model sdxl was removed, by tenant default" in caplog.text) == (200, True)
    with restarted(state) as server:
        assert "sdxl" not in server.engine.models, "nor is it tried again"


def test_only_a_key_with_the_scope_admin_changes_what_is_served(server: Served) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        for method, path in (("POST", ""), ("DELETE", "/x"), ("POST", "/x/loras"), ("DELETE", "/x/loras/y")):
            answer = server.http.request(method, f"/v1/admin/models{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert not server.engine.catalog.asked
    assert server.http.get("/v1/models").status_code == 200, "an admin key alone leaves the server open"


def test_a_refusal_is_passed_on_with_its_reason(server: Served) -> None:
    server.engine.catalog.refusal = "its weights are too large"
    answer = add(server, path="./sdxl", name="sdxl")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_refused")
    assert answer.json()["error"]["message"] == "its weights are too large."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "./x", "name": "a b"}, "name"),
        ({"path": "./x", "name": INFO.name}, "name"),
        ({"path": "./x", "aliases": [INFO.name]}, "aliases"),
        ({"path": "./x", "dtype": "int8"}, "dtype"),
        ({"path": "./x", "loras": "/no/such/place"}, "loras"),
        ({"path": "./x", "measure": "yes"}, "measure"),
        ({"path": "./x", "adapter": "os:system"}, "adapter"),
    ],
)
def test_a_wrong_field_is_named(refusing: Served, fields: dict[str, object], param: str) -> None:
    answer = add(refusing, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not refusing.engine.catalog.asked


WRONG_NAMES = (".", "..", "../x", "a/../b", "a//b", "/a", "a/", "a/.", "q/loras/z", "loras", "a b", "x" * 129)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_no_model_can_be_called_as_a_path_is_shortened(refusing: Served, name: str) -> None:
    for fields, param in (({"name": name}, "name"), ({"aliases": ["fine", name]}, "aliases")):
        answer = add(refusing, path="./x", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "where no part between slashes is empty, . or .. or loras" in answer.json()["error"]["message"]
    assert not refusing.engine.catalog.asked


@pytest.mark.parametrize("name", [".", "..", "a/b", "a b", ""])
def test_no_lora_can_be_called_as_a_path_is_shortened(refusing: Served, name: str) -> None:
    place = f"/v1/admin/models/{INFO.name}/loras"
    answer = refusing.http.post(place, json={"name": name, "path": "/ink.safetensors"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")
    assert "neither . nor .. alone" in answer.json()["error"]["message"]
    assert not refusing.engine.catalog.asked


def test_the_path_of_a_lora_that_a_client_shortens_removes_no_model(server: Served) -> None:
    assert add(server, path="./sdxl", name="sdxl").status_code == 201
    shortened = server.http.build_request("DELETE", "/v1/admin/models/sdxl/loras/..", headers=ADMIN)
    assert shortened.url.path == "/v1/admin/models/sdxl"
    answer = server.http.send(shortened)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "confirm")
    assert "?confirm=sdxl" in answer.json()["error"]["message"]
    assert server.http.get("/v1/models/sdxl").status_code == 200


def test_a_name_that_the_files_of_a_model_give_obeys_the_same_rule(server: Served) -> None:
    for found in ("my model", INFO.name):
        server.engine.catalog.found = found
        answer = add(server, path="./x")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")
    assert [one["id"] for one in server.http.get("/v1/models").json()["data"]] == [INFO.name]


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [
        ({"name": "a", "aliases": ["x"]}, {"name": "b", "aliases": ["x"]}, "aliases"),
        ({"name": "a", "aliases": ["b"]}, {"name": "b"}, "name"),
        ({"name": "a"}, {"name": "b", "aliases": ["a"]}, "aliases"),
        ({"name": "a"}, {"name": "a"}, "name"),
    ],
)
def test_of_two_changes_at_once_that_want_one_name_one_is_refused(
    server: Served, first: dict[str, Any], second: dict[str, Any], param: str
) -> None:
    """The first one is still reading its files when the second is asked for."""
    reads, may_read = threading.Event(), server.on_loop(asyncio.Event)

    async def reading() -> None:
        reads.set()
        await may_read.wait()

    server.engine.catalog.reading = reading
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(add, server, path="./one", **first)
        assert reads.wait(PATIENCE_S)
        other = pool.submit(add, server, path="./other", **second)
        eventually(lambda: server.engine.catalog.num_waiting)
        server.on_loop(may_read.set)
        assert one.result(PATIENCE_S).status_code == 201
        answer = other.result(PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for name in (first["name"], *first.get("aliases", ())):
        assert server.http.get(f"/v1/models/{name}").json()["id"] == "a"


def test_a_tenant_may_have_the_scope(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.ops]\nkeys = ["a"]\nadmin = true\n[tenants.web]\nkeys = ["b"]\n')
    tenants = load_tenants(ServerConfig(tenants=str(file), admin_key="c"))
    found = {key: tenants.find(key.encode()) for key in "abcd"}
    assert {key: one is not None and one.is_admin for key, one in found.items()} == {
        "a": True,
        "b": False,
        "c": True,
        "d": False,
    }
    assert found["d"] is None, "a server with keys is closed to others"
    with pytest.raises(ConfigError, match="a key of admin_key is also one of api_key or of a tenant"):
        load_tenants(ServerConfig(tenants=str(file), admin_key="b"))


@pytest.mark.slow
def test_a_model_may_go_while_a_request_for_it_is_checked() -> None:
    with start(safety_filter=f"{__name__}:Gate") as server, ThreadPoolExecutor(1) as pool:
        assert add(server, path="./sdxl", name="sdxl").status_code == 201
        asking = pool.submit(server.post, {"prompt": "x", "model": "sdxl"})
        assert Gate.is_asked.wait(PATIENCE_S)
        assert server.http.delete("/v1/admin/models/sdxl?confirm=sdxl", headers=ADMIN).status_code == 200
        Gate.may_answer.set()
        answer = asking.result(PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.slow
def test_a_stop_waits_no_longer_for_a_model_that_never_comes(server: Served) -> None:
    """As of a hub that does not answer."""

    async def add(_new: NewModel, *, measure: bool, check_name: object) -> ModelInfo:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    asked = threading.Event()
    server.engine.catalog.add = add

    def cut_off() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/admin/models", json={"path": "./sdxl"}, headers=ADMIN, timeout=60)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(cut_off)
        assert asked.wait(PATIENCE_S)
        server.stop()
        eventually(lambda: "stopped" in server.engine.log)
        server.skip(ServerConfig().drain_s)
        server.skip(CLOSE_S)
        asking.result(PATIENCE_S)
