"""Changes of what is served that meet each other; with real models: `live/test_catalog.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from clock import ManualLoop, run
from fake_engine import INFO
from tilework.core.model import LoraSource, ModelSource
from tilework.runtime.executor import ModelRefused
from tilework.runtime.models.catalog import Catalog

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
        leave=anything,
        join=anything,
    )

    async def scenario(loop: ManualLoop) -> None:
        going = asyncio.create_task(catalog.remove("other"))
        changing = asyncio.ensure_future(CHANGES[name](catalog))
        await loop.until(lambda: "other" not in catalog.infos)
        open_requests.clear()
        loop.advance(1)
        await going
        with pytest.raises(ModelRefused, match="other is served no more"):
            await changing

    run(scenario)
    assert list(catalog.infos) == ["first", "third"]
