"""Several models behind one server: each request goes to the one that it names, within the limits of that one."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fake_engine import EDITOR, INFO, VIDEOS, FakeEngine, Plan, Served, serving
from server.picture_files import plain
from tilework.core.model import ModelInfo, NotServed, PictureInput
from waiting import eventually

LARGE = replace(INFO, name="large", max_side=1024, default_height=128, default_width=128, path="someone/large")
EDITS = replace(EDITOR, name="edits")


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeEngine(others=(LARGE, EDITS))) as served:
        yield served


def drawn(server: Served, **fields: object) -> str:
    """The model that a request went to."""
    answer = server.http.post("/v1/images/generations", json={"prompt": "x", **fields})
    answer.raise_for_status()
    return server.engine.requests[-1].pipeline


def test_a_request_goes_to_the_model_that_it_names(server: Served) -> None:
    assert drawn(server) == drawn(server, model=INFO.name) == INFO.name, "the first one without a name"
    assert drawn(server, model="large") == drawn(server, model="someone/large") == "large", "a hub id is a name, too"


def test_limits_and_defaults_are_those_of_the_model(server: Served) -> None:
    drawn(server, model="large")
    assert (server.engine.specs[-1].height, server.engine.specs[-1].width) == (128, 128)
    side = LARGE.max_side
    assert drawn(server, model="large", size=f"{side}x{side - 16}") == "large"
    refused = server.http.post("/v1/images/generations", json={"prompt": "x", "size": f"{side}x{side - 16}"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "size"


def test_an_edit_goes_to_a_model_that_edits_and_another_refuses_it(server: Served) -> None:
    picture = ("a.png", plain(), "image/png")
    form = {"prompt": (None, "x"), "model": (None, "edits"), "image": picture}
    assert server.http.post("/v1/images/edits", files=form).status_code == 200
    assert server.engine.requests[-1].pipeline == "edits"
    refused = server.http.post("/v1/images/edits", files={**form, "model": (None, "large")})
    assert refused.status_code == 400


@pytest.mark.parametrize("is_form", [True, False])
def test_an_edit_that_names_no_model_goes_to_the_first_that_edits(server: Served, is_form: bool) -> None:
    form = {"prompt": (None, "x"), "image": ("a.png", plain(), "image/png")}
    body = {"prompt": "x", "image": b64encode(plain()).decode()}
    sent: Any = {"files": form} if is_form else {"json": body}
    assert server.http.post("/v1/images/edits", **sent).status_code == 200
    assert server.engine.requests[-1].pipeline == "edits"


INPAINT = replace(
    EDITOR,
    name="inpaint",
    pictures=(PictureInput(name="image", required=True), PictureInput(name="mask_image", required=True, is_mask=True)),
)


@pytest.fixture(scope="module")
def editors() -> Iterator[Served]:
    with serving(FakeEngine(others=(INPAINT, EDITS)), drain_s=0) as served:
        yield served


@pytest.mark.parametrize("is_form", [True, False])
@pytest.mark.parametrize(
    ("pictures", "model"),
    [(["image"], "edits"), (["image", "mask"], "inpaint"), (["image", "image"], "edits"), (["mask"], None), ([], None)],
)
def test_an_edit_that_names_no_model_goes_to_the_first_that_takes_its_pictures_and_lacks_none(
    editors: Served, is_form: bool, pictures: list[str], model: str | None
) -> None:
    """Where none does, the first that edits says what is wrong."""
    text, num_before = b64encode(plain()).decode(), len(editors.engine.requests)
    files: list[Any] = [("prompt", (None, "x")), *((one, ("a.png", plain(), "image/png")) for one in pictures)]
    body = {"prompt": "x"} | {one: [text] * pictures.count(one) for one in pictures}
    sent: Any = {"files": files} if is_form else {"json": body}
    answer = editors.http.post("/v1/images/edits", **sent)
    assert answer.status_code == (400 if model is None else 200), answer.text
    assert [one.pipeline for one in editors.engine.requests[num_before:]] == ([] if model is None else [model])
    if model is None:
        assert "give image as well" in answer.text if pictures else "inpaint draws from an image" in answer.text


def test_an_image_with_a_picture_goes_to_a_model_that_takes_it(editors: Served) -> None:
    assert drawn(editors) == INFO.name
    assert drawn(editors, image=b64encode(plain()).decode()) == "edits"


@pytest.mark.parametrize("is_form", [True, False])
def test_a_video_that_names_no_model_comes_from_the_first_that_makes_videos(is_form: bool) -> None:
    sent: Any = {"files": {"prompt": (None, "x")}} if is_form else {"json": {"prompt": "x"}}
    with serving(FakeEngine(others=(LARGE, VIDEOS)), drain_s=0) as served:
        answer = served.http.post("/v1/videos", **sent)
        assert answer.status_code == 200, answer.text
        assert served.engine.requests[-1].pipeline == VIDEOS.name
        assert drawn(served) == INFO.name


NO_MEMORY = "64x64 cannot run here (MemoryError: no memory)"


def without(info: ModelInfo, *, is_first: bool = False, **config: Any) -> AbstractContextManager[Served]:
    """A server that was started with this model, too, which cannot run there."""
    refused = {info.name: NotServed(name=info.name, info=info, reason=NO_MEMORY, is_first=is_first)}
    return serving(FakeEngine(others=(LARGE,), not_served=refused), **config)


def test_a_model_that_cannot_run_is_listed_with_the_reason_and_its_requests_get_503_with_it() -> None:
    broken = replace(INFO, name="broken", path="someone/broken")
    with without(broken) as server:
        listed = server.http.get("/v1/models").json()
        assert [one["id"] for one in listed["data"]] == [INFO.name, "large"]
        assert listed["not_served"] == [{"id": "broken", "reason": NO_MEMORY}]
        for name in ("broken", "someone/broken"):
            refused = server.http.post("/v1/images/generations", json={"prompt": "x", "model": name})
            assert refused.status_code == server.http.get(f"/v1/models/{name}").status_code == 503
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_served", "model")
            assert error["message"] == f'The model "{name}" cannot run on this server: {NO_MEMORY}. Use another model.'
            assert (refused.headers["x-should-retry"], refused.headers.get("retry-after")) == ("false", None)
        assert drawn(server) == INFO.name


def test_a_model_that_could_not_be_loaded_is_known_by_the_names_that_it_was_given(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[models.cut]\npath = "shapes"\naliases = ["house"]\n')
    refused = {"cut": NotServed(name="cut", reason="it cannot be loaded (no end)", is_first=False)}
    with serving(FakeEngine(not_served=refused), models=str(models)) as server:
        assert server.http.get("/v1/models").json()["not_served"] == [
            {"id": "cut", "reason": "it cannot be loaded (no end)"}
        ]
        for name in ("cut", "house"):
            answer = server.http.post("/v1/images/generations", json={"prompt": "x", "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_served")
        assert drawn(server) == INFO.name


def test_a_name_that_is_served_goes_before_that_of_a_model_that_is_not() -> None:
    with without(replace(INFO, name="broken", path="large")) as server:
        assert drawn(server, model="large") == "large"


def test_names_of_a_first_model_that_cannot_run_lead_to_no_other() -> None:
    with without(replace(INFO, name="broken"), is_first=True, served_model_name="house,shared") as server:
        assert drawn(server) == INFO.name, "what names no model goes to the first that runs"
        listed = server.http.get("/v1/models").json()
        assert [one["id"] for one in listed["data"]] == [INFO.name, "large"]
        assert listed["not_served"] == [{"id": name, "reason": NO_MEMORY} for name in ("house", "shared")]
        for name in ("house", "broken"):
            refused = server.http.post("/v1/images/generations", json={"prompt": "x", "model": name})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_served")
        assert server.http.get("/v1/model_info").json() == {"model_path": INFO.name}


def test_open_calls_of_a_model_that_cannot_run_after_a_start_fail_and_others_go_on(tmp_path: Path) -> None:
    held, kept = FakeEngine(others=(LARGE,), plan=Plan(is_held=True)), {"durable": str(tmp_path), "drain_s": 0}
    asked = {"prompt": "x"}, {"prompt": "x", "model": "large"}
    with serving(held, **kept) as server:
        uids = [server.post(one, headers={"Prefer": "respond-async"}).headers["x-request-id"] for one in asked]
    refused = {"large": NotServed(name="large", info=LARGE, reason=NO_MEMORY, is_first=False)}
    with serving(FakeEngine(not_served=refused), **kept) as server:
        states = [eventually(partial(ended, server, uid)) for uid in uids]
        error = server.http.get(f"/v1/requests/{uids[1]}").json()["error"]
    assert states == ["done", "failed"]
    assert error["code"] == "model_not_served"
    assert "sent again" not in error["message"]


def ended(server: Served, uid: str) -> str | None:
    status = server.http.get(f"/v1/requests/{uid}").json()["status"]
    return status if status in ("done", "failed") else None


def test_an_unknown_model_is_named_with_those_that_are_served(server: Served) -> None:
    refused = server.http.post("/v1/images/generations", json={"prompt": "x", "model": "other"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert all(name in error["message"] for name in (INFO.name, "large", "edits"))


def test_models_are_listed_each_with_its_limits_and_devices(server: Served) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == [INFO.name, "large", "edits"]
    assert [one["tilework"]["max_side"] for one in listed] == [INFO.max_side, LARGE.max_side, EDITOR.max_side]
    assert listed[1]["tilework"]["devices"] == [0, 1]
    assert server.http.get("/v1/models/large").json() == listed[1]
    assert server.http.get("/v1/models/other").status_code == 404
