"""Where PyAV cannot be imported, in no process: images are served, and what needs it is refused and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from suite.server import serving

from tilework.distribution import install_command

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is started from here."""
    (tmp_path / "av.py").write_text("raise ImportError('it is not here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "tilework", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def test_a_server_of_images_starts_draws_and_refuses_a_clip() -> None:
    ask = {"prompt": "a red circle", "size": "64x64"}
    with serving(1) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        drawn = http.post("/v1/images/generations", json=ask | {"num_inference_steps": 1})
        assert drawn.status_code == 200, drawn.text
        refused = http.post("/v1/videos", json=ask)
        error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "model")
    assert 'model = "shapes" is not accepted' in error["message"]
    assert "name a model that makes clips" in error["message"]


def test_a_model_of_clips_is_refused_with_the_remedy() -> None:
    done = command("serve", "shapes-motion", "--device", "cpu", "--workers", "1", "--port", "0")
    assert done.returncode == 2
    assert "PyAV, which cannot be imported (it is not here)" in done.stderr
    assert install_command("serve") in done.stderr


def test_doctor_says_it_as_a_warning() -> None:
    checks = json.loads(command("doctor", "--device", "cpu", "--json").stdout)["checks"]
    (videos,) = (one for one in checks if one["what"] == "videos")
    assert videos["level"] == "warning"
    assert "it is not here" in videos["found"]
    assert videos["remedy"] == install_command("serve")
