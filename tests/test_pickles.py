"""What may run what it reads: no pickle lies where a path leads; only two pipes between own processes carry them.

These are the socket without a name between the server and a worker (`comm/messages`), and that by which the standard
library starts processes (`multiprocessing`): its forkserver listens in a folder of mode 0700.
"""

from __future__ import annotations

import ast
import multiprocessing
from multiprocessing import connection, util
from pathlib import Path

import pytest

import tilework
from tilework.core.model import ModelSource
from tilework.core.wire.commands import AddModel
from tilework.core.wire.reports import Loaded, ModelRead
from tilework.runtime.nodes.messages import node_codec

ROOT = Path(tilework.__file__).parent
RUNS_WHAT_IT_READS = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"),
    *("multiprocessing.connection", "multiprocessing.managers", "multiprocessing.reduction", "copyreg", "code"),
}
PIPE = "comm/messages.py"
STARTS_PROCESSES = {"runtime/worker_process.py", "sim/plan/trial.py"}
"""By `multiprocessing`, or by pools on top of it. They listen nowhere themselves."""
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}


def reads(path: Path) -> set[str]:
    """What a file imports, or calls, that may run what it reads."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            case ast.Call(func=ast.Attribute(value=ast.Name(module), attr=name)) if (module, name) in LOADS:
                is_safe = any(one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords)
                names = [] if is_safe else ["pickle"]
            case _:
                continue
        found |= {name for name in names if name in RUNS_WHAT_IT_READS or name.split(".")[0] == "multiprocessing"}
        found |= {"pickle" for name in names if name.split(".")[0] in RUNS_WHAT_IT_READS}
    return found - {"multiprocessing.connection.Connection"}


def test_nothing_reads_a_pickle_but_one_pipe_between_own_processes() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    assert {name for name, path in paths.items() if "pickle" in reads(path)} - {"core/wire/spec.py"} == {PIPE}
    imported = {name for name, path in paths.items() if any(one.startswith("multiprocessing") for one in reads(path))}
    assert imported == STARTS_PROCESSES
    buffers = paths["core/wire/spec.py"].read_text("utf-8")
    assert "from pickle import PickleBuffer" in buffers, "a picture says how it is sent, and reads nothing"
    assert "import pickle" not in buffers
    assert "open(" not in paths[PIPE].read_text("utf-8"), "the pipe opens no file"


@pytest.mark.parametrize(
    "message", [AddModel(ModelSource(path="m"), b""), ModelRead(Loaded((), 0), b"")], ids=["to", "from"]
)
def test_no_skeleton_comes_over_the_network(message: object) -> None:
    """Workers read skeletons as pickles: who speaks as a server, or as an agent, must not hand them one."""
    with pytest.raises(KeyError):
        node_codec().encode(message)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "from multiprocessing.connection import Listener",
    ],
)
def test_what_reads_a_pickle_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text(line)
    assert reads(path)
    path.write_text("import torch\ntorch.load(path, weights_only=True)\nimport json")
    assert not reads(path)


def test_the_processes_of_the_library_meet_where_no_other_user_comes() -> None:
    """Python 3.11.0 took a socket without a path, to which every user can connect and send a pickle: CVE-2022-42919."""
    address = connection.arbitrary_address("AF_UNIX")
    assert not util.is_abstract_socket_namespace(address)
    assert Path(address).parent == Path(util.get_temp_dir())
    assert Path(address).parent.stat().st_mode & 0o777 == 0o700
    assert "forkserver" in multiprocessing.get_all_start_methods()
