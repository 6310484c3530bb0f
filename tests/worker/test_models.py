"""Models and LoRAs that come to a worker and go: what cannot be served is answered, and ends nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tilework.core.model import LoraSource, ModelSource
from tilework.core.wire.commands import AddLora, AddModel, RemoveModel
from tilework.core.wire.reports import LoraAdded, ModelAdded
from tilework.worker.models import models as module
from tilework.worker.models.models import Models

LORA = LoraSource("ink", "/ink.safetensors")
BROKEN = "broken cannot be loaded any more: its files are damaged"


def models(**loras: Any) -> Models:
    """A worker that serves `whole`, and could not load `broken`."""
    return Models({"whole": Mock()}, torch.device("cpu"), broken={"broken": BROKEN}, loras=Mock(**loras))


@pytest.mark.parametrize(
    ("model", "said"), [("broken", BROKEN), ("gone", "gone is not served here")], ids=["broken", "gone"]
)
def test_a_lora_of_a_model_that_this_worker_lacks_is_refused(model: str, said: str) -> None:
    assert models().change(AddLora(model, LORA)) == LoraAdded(None, said)


def test_a_lora_whose_reading_fails_in_any_way_is_refused() -> None:
    served = models(add=Mock(side_effect=KeyError("down_blocks")))
    assert served.change(AddLora("whole", LORA)) == LoraAdded(None, "KeyError: 'down_blocks'")


@pytest.mark.parametrize("goes", [True, False])
def test_a_model_that_was_broken_is_drawn_once_it_is_added_again(goes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Mock()
    family.info.name = "broken"
    monkeypatch.setattr(module, "exporter_of", lambda _skeleton: family)
    served = models()
    assert served.broken == {"broken": BROKEN}
    if goes:
        served.change(RemoveModel("broken"))
        assert served.broken == {}, "a worker says so of no model that has gone"
    source = ModelSource(path="m", name="broken")
    assert served.change(AddModel(source, b"skeleton")) == ModelAdded("broken")
    assert ("broken" in served, served.broken) == (True, {})
