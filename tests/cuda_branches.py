"""What runs on CUDA alone, or is decided by it, and the tests that drive it where there is no card.

python -m cuda_branches                   prints the table of README.md; in this folder
python -m cuda_branches --break [PLACE]   breaks each use, of places that begin so, and runs the tests of its place; if
                                          none fails, the exit status is 1

`cuda_uses.py` says what is found, and what stands there where it is broken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from cuda_uses import Use, uses

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "tilework"
_PROCESSES = 2
_HEAVY = ("diffusers", "hypothesis.strategies", "httpx", "pytest", "torch", "transformers", "uvicorn.server")
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout")
_PATIENCE_S = "20"  # Of a wait in a test: for what never comes, if something is broken.

DRIVERS: Mapping[str, tuple[str, ...]] = {
    "cli/test_cost_memory.py::test_a_plan_is_that_of_a_card": ("cli/commands/cost_memory.py command",),
    "cli/test_cost_memory.py::test_cards_that_lack_something_are_named_before_anything_starts": (
        "cli/models.py _check_attention",
    ),
    "cli/test_devices.py::test_a_machine_without_cards_may_have_nodes_with_some": ("cli/devices.py found_devices",),
    "cli/test_devices.py::test_auto_takes_cuda_if_there_is_any_and_says_so": (
        "cli/devices.py FoundDevices.dtype",
        "cli/devices.py found_devices",
    ),
    "cli/test_devices.py::test_cuda_that_there_is_not_names_build_driver_and_remedy": (
        "cli/devices.py found_devices",
        "pipelines/cuda/state.py CudaState.build",
        "pipelines/cuda/state.py CudaState.reason_against",
        "pipelines/cuda/state.py CudaState.remedy",
    ),
    "cli/test_doctor.py::test_a_cuda_build_without_a_device": ("cli/commands/doctor.py cuda_findings",),
    "cli/test_fake.py::test_weights_are_made_on_a_card_if_there_is_one": (
        "cli/commands/fake.py _DEVICES",
        "cli/commands/fake.py _device",
    ),
    "cli/test_nodes.py::test_ray_reserves_a_card_for_each_worker_of_one": ("cli/nodes.py RayNodes.executor",),
    "comm/test_node.py::test_a_node_of_nccl_is_made_on_its_own_card_and_stream": ("comm/links.py NcclLink.__init__",),
    "comm/test_node.py::test_an_exchange_of_an_aligned_group_is_one_call_into_the_communicator": (
        "comm/links.py NcclLink.all_gather",
        "comm/links.py NcclLink.all_to_all",
    ),
    "comm/test_node.py::test_messages_of_nccl_outside_of_its_parts_go_in_one_group_of_operations": (
        "comm/links.py NcclLink.abort",
        "comm/links.py NcclLink.exchange",
    ),
    "comm/test_node.py::test_parts_are_split_off_the_node_by_all_of_its_ranks": ("comm/links.py NcclLink.split",),
    "comm/test_node.py::test_what_keeps_nccl_from_forming_is_said_and_what_to_try": ("comm/forming.py _TRY",),
    "comm/test_node.py::test_workers_of_cards_form_a_node_of_nccl": (
        "comm/links.py LINKS",
        "core/comm.py COLLECTIVES",
        "core/comm.py USUAL_COLLECTIVES",
    ),
    "patches/test_stitcher.py::test_moments_by_the_kernel": ("patches/stitch_kernel.py moments",),
    "patches/test_stitcher.py::test_patches_of_a_card_have_the_kernels": ("patches/operators.py kernels_for",),
    "patches/test_stitcher.py::test_each_kind_of_edge_by_the_kernel": ("patches/stitch_kernel.py stitch",),
    "pipelines/test_cuda.py::TestAnotherProcess::test_it_answers": (
        "pipelines/cuda/look.py cuda_state",
        "pipelines/cuda/state.py CudaState.from_json",
    ),
    "pipelines/test_cuda.py::test_a_device_without_nvml": ("pipelines/cuda/look.py look",),
    "pipelines/test_cuda.py::test_a_cuda_build_without_a_device_says_what_torch_says": ("pipelines/cuda/look.py look",),
    "pipelines/test_cuda.py::test_a_process_that_works_on_a_card_takes_memory_on_no_other": (
        "pipelines/cuda/look.py _card",
        "pipelines/cuda/look.py look",
    ),
    "pipelines/test_cuda.py::test_layers_are_brought_to_the_card_of_the_process_by_its_index": (
        "core/model.py DEVICES",
        "pipelines/loading.py device_of",
    ),
    "pipelines/test_cuda.py::test_cards_and_driver_are_found": ("pipelines/cuda/look.py _card",),
    "pipelines/test_cuda.py::test_the_other_process_tries_them": ("pipelines/cuda/look.py _card",),
    "pipelines/test_cuda_calls.py::test_a_card_that_lacks_a_scheme_is_named_before_anything_is_read": (
        "pipelines/loading.py _cards",
        "pipelines/setup/quantize.py _check_cards",
    ),
    "pipelines/test_cuda_calls.py::test_copies_go_between_the_device_and_pinned_memory_and_the_host_does_not_wait": (
        "pipelines/cuda/copies.py CudaStreams.copy",
        "pipelines/cuda/copies.py CudaStreams.like",
        "pipelines/cuda/copies.py CudaStreams.pinned",
    ),
    "pipelines/test_cuda_calls.py::test_graphs_of_a_recorder_share_a_pool_and_let_other_threads_work": (
        "pipelines/cuda/graphs.py CudaRecorder",
        "pipelines/cuda/graphs.py CudaRecorder.record",
    ),
    "pipelines/test_cuda_calls.py::test_steps_are_recorded_where_that_is_asked_for_on_cuda": (
        "pipelines/loading.py family_of",
    ),
    "pipelines/test_cuda_calls.py::test_streams_and_events_with_times_are_those_of_the_device": (
        "pipelines/cuda/copies.py CudaStreams.current",
        "pipelines/cuda/copies.py CudaStreams.entered",
        "pipelines/cuda/copies.py CudaStreams.event",
        "pipelines/cuda/copies.py CudaStreams.new",
    ),
    "pipelines/test_cuda_calls.py::test_the_plan_of_a_decode_counts_kernels_of_the_host_alone": (
        "pipelines/clips/plan.py decode_memory",
    ),
    "pipelines/test_cuda_calls.py::test_weights_that_go_to_a_card_are_copied_nowhere_on_the_host": (
        "pipelines/loading.py load_stock",
    ),
    "pipelines/test_serialization.py::test_tensors_of_a_card_come_back_to_a_card_by_no_copy_on_the_host": (
        "pipelines/serialization.py _Reader._tensor",
        "pipelines/serialization.py _place",
    ),
    "pipelines/test_setup.py::test_layers_are_pinned_ahead_where_the_host_has_room": (
        "pipelines/setup/offload.py offload_layers",
    ),
    "pipelines/test_torch_generators.py::test_what_is_drawn_on_the_card_that_computes_follows_from_the_seed": (
        "pipelines/stock/coroutine.py _computing_device",
        "pipelines/stock/coroutine.py _seeded",
    ),
    "runtime/test_costs.py::test_devices_do_not_slow_each_other_down_but_cores_do": (
        "runtime/models/costs.py profile_key",
    ),
    "worker/test_anew.py::test_torch_says_whether_cuda_was_touched": ("worker/start/anew.py was_born_with_cuda",),
    "worker/test_cuda_calls.py::test_a_budget_on_a_card_leaves_the_hosts_memory_alone": (
        "worker/memory.py Budget.__init__",
        "worker/memory.py Budget.is_exceeded_by",
    ),
    "worker/test_cuda_calls.py::test_a_run_may_take_its_budget_beside_what_lies_on_the_card": (
        "worker/memory.py Budget._set_fraction",
        "worker/memory.py Budget.hold",
    ),
    "worker/test_cuda_calls.py::test_a_step_is_timed_when_it_has_been_recorded_with_the_most_memory_of_all_its_runs": (
        "worker/calibrate.py _Clock.time",
        "worker/calibrate.py _num_warmups",
    ),
    "worker/test_cuda_calls.py::test_a_worker_of_a_card_begins_anew_where_its_parent_has_used_cuda": (
        "worker/process.py _device_name",
        "worker/process.py serve",
    ),
    "worker/test_cuda_calls.py::test_a_worker_uses_its_own_card": ("worker/process.py _prepare",),
    "worker/test_cuda_calls.py::test_copies_beside_runs_are_those_of_its_own_card_where_they_are_asked_for": (
        "worker/process.py _has_cuda",
        "worker/process.py _side_copies",
    ),
    "worker/test_cuda_calls.py::test_a_decode_may_take_what_weights_leave_of_the_card": (
        "worker/models/describe.py _decode_memory",
    ),
    "worker/test_cuda_calls.py::test_only_files_that_a_card_loads_from_are_registered": (
        "worker/models/shared_weights.py SharedWeights.open",
    ),
    "worker/test_cuda_calls.py::test_files_are_registered_by_the_runtime_of_cuda": (
        "worker/models/pinned.py _runtime",
        "worker/models/pinned.py register",
    ),
    "worker/test_cuda_calls.py::test_what_a_card_is_called_and_what_all_have_taken_of_it": (
        "worker/hardware.py describe_hardware",
        "worker/hardware.py memory_in_use",
    ),
    "worker/test_cuda_calls.py::test_what_ran_out_of_memory_leaves_none_in_the_allocator": (
        "worker/memory.py Budget.release",
    ),
    "worker/test_launched_steps.py::test_events_are_waited_for_and_not_the_stream": (
        "worker/synchronize.py _recorded",
        "worker/synchronize.py events_on",
    ),
    "worker/test_process.py::test_results_leave_by_a_stream_of_their_own_of_the_workers_device": (
        "worker/process.py _side_stream",
    ),
    "worker/test_readings.py::test_a_card_says_all": (
        "worker/readings.py NvmlCard._asked",
        "worker/readings.py NvmlCard._reasons",
        "worker/readings.py NvmlCard.read",
    ),
    "worker/test_readings.py::test_a_card_is_found_by_its_uuid": ("worker/readings.py NvmlCard.of",),
    "worker/test_readings.py::test_they_come_from_a_thread_of_their_own_that_knows_the_device": (
        "worker/readings.py report_readings",
    ),
    "worker/test_readings.py::test_what_the_start_took_is_the_context_and_the_weights": (
        "worker/readings.py read_allocator",
        "worker/readings.py read_start",
    ),
    "worker/test_shared_weights.py::test_weights_go_from_their_files_to_an_accelerator_and_nowhere_else": (
        "worker/process.py _family",
    ),
    "worker/test_side_loads.py::test_steps_wait_for_the_current_stream_and_not_for_copies_by_another": (
        "worker/synchronize.py synchronize",
    ),
    "worker/test_worker.py::test_cuda_says_whether_it_has_failed": ("worker/hardware.py has_failed",),
}
"""By test: the places that it drives, each a file and a function, or a name at the top of a module."""


@dataclass(frozen=True, slots=True)
class Found:
    """A use in a module, whose path is below `tilework`."""

    module: str
    use: Use

    @property
    def place(self) -> str:
        return f"{self.module} {self.use.where}"


@cache
def found() -> tuple[Found, ...]:
    """The uses of all modules."""
    return tuple(
        Found(path.relative_to(SOURCE).as_posix(), use)
        for path in sorted(SOURCE.rglob("*.py"))
        for use in uses(path.read_text("utf-8"))
    )


def tests_of(place: str) -> list[str]:
    """The tests that drive a place, as pytest takes them in the repository."""
    return [f"tests/{test}" for test, places in DRIVERS.items() if place in places]


def table() -> str:
    """By module: how many places it has, and the files with the tests that drive them; in Markdown."""
    everything = found()
    lines = ["| file | places | driven by |", "|---|---|---|"]
    for module in dict.fromkeys(one.module for one in everything):
        places = {one.place for one in everything if one.module == module}
        files = {test.partition("::")[0].removeprefix("tests/") for place in places for test in tests_of(place)}
        drivers = ", ".join(f"`{file}`" for file in sorted(files))
        lines.append(f"| `{module}` | {len(places)} | {drivers} |")
    return "\n".join(lines)


def unnoticed(asked: Sequence[Found]) -> Iterator[str]:
    """Those of which no test notices that they are broken; each is printed when it has been tried.

    Raises:
        AssertionError: a test fails with the sources as they are.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(_HEAVY))

    def status(tests: Sequence[str], module: str = "", text: str = "") -> int | None:
        process = processes.Process(target=_run, args=(tests, module, text))
        process.start()
        process.join()
        return process.exitcode

    everything = sorted({test for one in asked for test in tests_of(one.place)})
    assert status(everything) == 0, "a test fails with the sources as they are"
    with ThreadPoolExecutor(_PROCESSES) as pool:
        statuses = pool.map(lambda one: status(tests_of(one.place), one.module, one.use.broken), asked)
        for one, ended in zip(asked, statuses, strict=True):
            name = f"{one.place}:{one.use.line}: {one.use.code}"
            print(f"{name}: {'NOT NOTICED' if ended == 0 else 'noticed'}", flush=True)
            if ended == 0:
                yield name


def _run(tests: Sequence[str], module: str, text: str) -> None:
    """In a process of its own, which ends with pytest's status: these tests with this text in the place of a module."""
    import pytest

    usual, path = SourceFileLoader.get_code, str(SOURCE / module)

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return compile(text, path, "exec") if loader.path == path else usual(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    os.chdir(TESTS.parent)
    os.environ |= {"TESTS_PATIENCE_S": _PATIENCE_S, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    sys.exit(pytest.main([*_PYTEST, *tests]))


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="cuda_branches")
    parser.add_argument("--break", dest="places", nargs="?", const="", metavar="PLACE")
    asked = parser.parse_args()
    if asked.places is None:
        print(table())
        return 0
    missed = list(unnoticed([one for one in found() if one.place.startswith(asked.places)]))
    print(f"{len(missed)} not noticed", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
