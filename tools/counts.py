"""Counts of what there is to read: lines of code, files on the way from HTTP to the denoiser, files that know a field.

`python tools/counts.py` starts a server with the shipped model, sends it one request, and takes the call stacks at four
points of its way: where the engine gets it, where the controller decides on it, where a work goes down a pipe, and
where the worker asks the denoiser. The files of Tilework on these stacks are those that a reader opens on this way.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

import tilework

ROOT = Path(tilework.__file__).parent
FIELDS = ("spare_cache", "preview_every", "on_miss", "guided")
"""Fields of a request that were added one by one; each file that names one has to be touched for the next."""
_STACKS = "COUNTS_STACKS"
_STARTING = ("cli/", "worker/start/", "worker/process.py")
_PATIENCE_S = 120.0


def note_stack(point: str, callee: str) -> None:
    """Keep the files of Tilework on the present call stack, and that of the callee, once for each point.

    Frames that only started the process, below its loop, are no part of the way; nor is the measuring at the start.
    """
    place = Path(os.environ[_STACKS]) / f"{point}.json"
    frames = [frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
    files = [str(Path(one).relative_to(ROOT)) for one in (*frames, callee)]
    if not place.exists() and "worker/calibrate.py" not in files:
        place.write_text(json.dumps([one for one in files if not one.startswith(_STARTING)]), "utf-8")


def traced_pipeline() -> Any:
    """Return the family of the shipped model, with a note of the stack where it asks the denoiser."""
    from tilework.pipelines.families.sd3 import StableDiffusion3

    class Traced(StableDiffusion3):
        def predict(self, states: Any, pack: Any = None) -> Any:
            note_stack("4 denoiser", inspect.getfile(StableDiffusion3))
            return super().predict(states, pack)

    return Traced


def __getattr__(name: str) -> Any:
    """Give `--adapter` the traced family: this module is imported by the server, too, which loads no model."""
    if name == "Traced":
        return traced_pipeline()
    raise AttributeError(name)


def spine() -> dict[str, list[str]]:
    """Serve one request, and return the files on its stacks, by point."""
    from tilework.control.controller import Controller
    from tilework.runtime.engine import Engine
    from tilework.runtime.worker_process import WorkerProcess

    for owner, method, point in (
        (Engine, "submit", "1 engine"),
        (Controller, "handle", "2 controller"),
        (WorkerProcess, "send", "3 pipe"),
    ):
        _note_calls(owner, method, point)
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as free:
        os.environ[_STACKS] = directory
        port = free.getsockname()[1]
        free.close()
        threading.Thread(target=_ask, args=(f"http://127.0.0.1:{port}",), daemon=True).start()
        sys.argv = ["tilework", "serve", "shapes", "--workers", "1", "--port", str(port), "--adapter", "counts:Traced"]
        with suppress(SystemExit):
            _serve()
        found = {}
        for place in sorted(Path(directory).glob("*.json")):
            files = dict.fromkeys(json.loads(place.read_text("utf-8")))
            found[place.stem] = list(files)
        return found


def _serve() -> None:
    from tilework.cli import main

    main()


def _note_calls(owner: Any, method: str, point: str) -> None:
    """Note the stack of a method, but for calls at the start, before the server has had its request."""
    real = getattr(owner, method)

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        if method == "submit" or _is_of_request(args):
            note_stack(point, inspect.getfile(owner))
        return real(self, *args, **more)

    setattr(owner, method, noted)


def _is_of_request(args: tuple[Any, ...]) -> bool:
    return any(type(one).__name__ in ("Submitted", "Execute") for one in args)


def _ask(url: str) -> None:
    """Send one request when the server is ready, then end the server."""
    until_s = time.monotonic() + _PATIENCE_S
    try:
        while time.monotonic() < until_s:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        body = {"prompt": "a large red circle on a blue background", "size": "64x64"}
        httpx.post(f"{url}/v1/images/generations", json=body, timeout=_PATIENCE_S).raise_for_status()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def lines(folder: Path) -> int:
    """Return the number of lines of all Python files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def files_with(field: str) -> int:
    """Return the number of files of the product that name a field of a request."""
    word = re.compile(rf"\b{field}\b")
    return sum(bool(word.search(path.read_text("utf-8"))) for path in ROOT.rglob("*.py"))


def main() -> None:
    print(f"src/tilework: {lines(ROOT):,} lines; lab/src: {lines(ROOT.parents[1] / 'lab' / 'src'):,}")
    for field in FIELDS:
        print(f"files that name {field}: {files_with(field)}")
    if "--lines" in sys.argv:
        return
    found = spine()
    for point, files in found.items():
        print(f"{point}: {', '.join(files)}")
    everything = {one for files in found.values() for one in files}
    print(f"files on the way from HTTP to the denoiser: {len(everything)}")


if __name__ == "__main__":
    main()
