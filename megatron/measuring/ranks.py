"""Program of the ranks that measure a machine; the first writes the file of rates.

Started once a rank by the launcher, or alone. Exit status: megatron/runtime/commands.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from megatron.runtime.first_steps import end_process_at_interrupt

    end_process_at_interrupt()

import datetime
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.measuring.options import MeasureOptions, read_options
from megatron.measuring.report import BUSY_SPREAD, summary, write_rates
from megatron.resilience.process import leave, print_error, print_once, status_of
from megatron.runtime.agent_link import AGENT_SOCKET
from megatron.runtime.commands import counted
from megatron.runtime.devices import find_device
from megatron.runtime.first_steps import importing
from megatron.runtime.network import STORE_SOCKET, is_first_rank

BEGAN = "MEGATRON_MEASURE_BEGAN"
Alone = Callable[[], dict[str, Any]]
PLACED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE_SOCKET, AGENT_SOCKET)


def main(arguments: Sequence[str]) -> None:
    """Measure what the flags say. Collective over the ranks that a launcher has started."""
    # a launcher ends its ranks so; a file or a process that is left would outlive the measurement
    signal.signal(signal.SIGTERM, _interrupt)
    options = read_options(arguments)
    # the process that measures a single rank goes on counting
    os.environ.setdefault(BEGAN, str(time.time()))
    world_size, per_node = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    with importing():
        from megatron.runtime import accelerator

        device = accelerator.choose_device(options.device)
    if options.alone is not None:
        own = _measure_alone(options, device, _thread_counts(int(os.environ["MEGATRON_RANKS"])))
        Path(options.alone).write_text(json.dumps(own), encoding="utf-8")
        return
    found: dict[str, Any] = {}
    alone = functools.partial(_alone, options, device, per_node, world_size)
    # ranks of a CPU wait for the first in a collective: where they wait to join, torch lets them try ever less often.
    # Elsewhere the first opens its device only when the process that measures alone has left it
    if not find_device(device).is_host and is_first_rank():
        found = alone()
        alone = functools.partial(dict, found)
    if world_size > 1:
        found = _measure_together(options, device, alone, per_node)
    elif not found:
        found = alone()
    if is_first_rank():
        _write(options, device, found, world_size, per_node)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _thread_counts(per_node: int) -> list[int]:
    """Return the threads that a rank has on a host with 1, 2, 4, ... ranks, most first."""
    cores, ranks, counts = os.cpu_count() or 1, 1, []
    while ranks < per_node:
        counts.append(max(1, cores // ranks))
        ranks *= 2
    return list(dict.fromkeys([*counts, max(1, cores // per_node)]))


def _alone(options: MeasureOptions, device: str, per_node: int, world_size: int) -> dict[str, Any]:
    """Return what one rank measures, in a process of its own where there are others.

    Trainings of a single rank need a world of one; on a device it is free until this rank opens it.
    """
    os.environ["MEGATRON_RANKS"] = str(per_node)
    if world_size == 1:
        return _measure_alone(options, device, _thread_counts(1))
    with tempfile.TemporaryDirectory(prefix="megatron-measure-") as folder:
        file = Path(folder) / "alone.json"
        command = [sys.executable, "-m", "megatron.measuring.ranks", *_flags(options), "--alone", str(file)]
        # neither this rank's place nor its sockets
        environment = {name: value for name, value in os.environ.items() if name not in PLACED}
        environment["OMP_NUM_THREADS"] = str(max(_thread_counts(per_node)))
        process = subprocess.Popen(command, env=environment)
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status:
            raise RuntimeError(f"the process that measures a single rank ended with status {status}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _flags(options: MeasureOptions) -> list[str]:
    flags = ["--output", options.output, "--folder", options.folder, "--device", options.device]
    flags += ["--precisions", *options.precisions]
    return [*flags, "--tiny"] if options.is_tiny else flags


def _measure_alone(options: MeasureOptions, device: str, threads: Sequence[int]) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.measuring.alone import AloneRates

    try:
        return AloneRates(options, device, _say).measure(threads)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure_together(options: MeasureOptions, device: str, alone: Alone, per_node: int) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.measuring.together import measure_together

    sizes = options.sizes(is_host=find_device(device).is_host)
    try:
        return measure_together(alone, device, sizes, per_node, _say)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _write(options: MeasureOptions, device: str, found: dict[str, Any], world_size: int, per_node: int) -> None:
    import torch

    from megatron.measuring.alone import file_tree

    record, today = find_device(device), datetime.date.today().isoformat()
    cores = os.cpu_count() if record.is_host else None
    what = counted(per_node, "rank")
    if world_size > per_node:
        what += f" of {world_size // per_node} nodes"
    chip = record.chip_name() or f"{cores} cores"
    title = f"{device}, {chip}, {what}"
    source = f"megatron-plan --measure on {socket.gethostname()}, {today}, torch {torch.__version__}"
    tree = file_tree(title, device, source, cores, found)
    write_rates(Path(options.output), tree)
    print(summary(tree, options.output), flush=True)
    if tree["spread"] > BUSY_SPREAD:
        print_error(
            f"WARNING: repeats differ by {tree['spread']:.0%}, and predictions by these rates may too; measure again "
            "on a machine that does nothing else"
        )


def _say(text: str) -> None:
    """Print a line of progress on the first rank, with the seconds since its start."""
    print_once(f"{time.time() - float(os.environ[BEGAN]):5.0f} s  {text}")


def preload() -> None:
    """Import what the ranks need, before they are forked."""
    import megatron.measuring.alone
    import megatron.measuring.together  # noqa: F401


def process() -> NoReturn:
    """Run the process of a rank."""
    leave(status_of(main, sys.argv[1:]))


if __name__ == "__main__":
    process()
