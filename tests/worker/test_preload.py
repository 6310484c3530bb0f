"""What the forkserver imports, and before what."""

from __future__ import annotations

import os
import subprocess
import sys

STOPS_AT_TORCH = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
import tilework.worker.start.preload
"""


def test_libraries_that_ask_for_devices_while_they_are_imported_ask_nvml() -> None:
    """Else the forkserver is unfit for CUDA, and each worker has to import everything again."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    run = subprocess.run(
        [sys.executable, "-c", STOPS_AT_TORCH], check=False, env=environment, capture_output=True, text=True
    )
    assert run.stdout == "1\n", run.stderr
