"""torchrun as a process of ours: what it prints is passed on and kept, and so are signals; it never outlives us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from megatron.exit_codes import ABORTED, DONE, FAILED, HUNG, REFUSED
from megatron.files import IMPORT_ROOT
from megatron.instructlab.arguments import TorchrunArgs
from megatron.launch.child_processes import end_with_parent, kill_tree, noted_signals
from megatron.resilience.shutdown import SIGNALS

MEANINGS = {
    FAILED: "a fault that nobody foresaw; another try may succeed",
    REFUSED: "refused: a fault of the options, the data, the model or the device, told above",
    ABORTED: "aborted: too many steps in a row were skipped, or the ranks' copies of a parameter differ",
    HUNG: "hung: no progress was seen for too long; another try may succeed",
}
LOOK_S = 0.1


def torchrun_command(torch_args: TorchrunArgs, ranks_per_node: int, train_flags: Sequence[str]) -> list[str]:
    """What starts the ranks of this node."""
    if torch_args.master_addr is not None:
        meeting = [f"--master-addr={torch_args.master_addr}", f"--master-port={torch_args.master_port or 29500}"]
    elif torch_args.rdzv_endpoint is not None:
        meeting = [f"--rdzv-endpoint={torch_args.rdzv_endpoint}"]
    else:
        meeting = ["--standalone"]  # a free port of this machine
    return [
        *(sys.executable, "-u", "-m", "megatron.instructlab.torchrun"),
        *(f"--nproc-per-node={ranks_per_node}", f"--nnodes={torch_args.nnodes}"),
        *(f"--node-rank={torch_args.node_rank}", f"--rdzv-id={torch_args.rdzv_id}"),
        *(*meeting, "-m", "megatron.train", *train_flags),
    ]


def environment_of_ranks(device: str, ranks_per_node: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment["DS_ACCELERATOR"] = device
    if device == "cpu":
        # torch takes every core for each rank, and they would fight over them
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks_per_node)))
    return environment


def run_to_the_end(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run torchrun, copying what it prints to our stdout and to a file.

    A signal that asks for a stop goes to the ranks, which save and end; once they have, it takes its course here: a
    Ctrl-C raises KeyboardInterrupt, a SIGTERM ends the process unless the caller handles it. Raises RuntimeError, with
    the status and its meaning, for a run that failed.
    """
    with noted_signals(SIGNALS) as received:
        # a session of its own: a Ctrl-C reaches the ranks once, through us
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent(signal.SIGTERM),  # torchrun then ends its ranks,
        )
        assert process.stdout is not None
        output = _Output(process.stdout, log)
        output.start()
        asked: int | None = None
        try:
            while process.poll() is None:
                time.sleep(LOOK_S)
                if received and _tell_ranks(process, received[0]):
                    number = received.popleft()
                    asked = asked or number
                    told = "the ranks were told; they stop after their step and save. A second signal ends them at once"
                    print(f"{signal.Signals(number).name}: {told}", file=sys.stderr, flush=True)
            output.join()
        finally:
            kill_tree(process.pid)
            process.wait()
    if asked is not None:
        signal.raise_signal(asked)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if status != DONE:
        raise RuntimeError(f"the training ended with status {status}: {meaning(status)}. All it said is in {log}")


def meaning(status: int) -> str:
    """Of an exit status, as docs/launching.md lists them."""
    if status > 128:
        with contextlib.suppress(ValueError):
            name = signal.Signals(status - 128).name
            return f"{name} ended it" + (", often for want of memory" if name == "SIGKILL" else "")
    return MEANINGS.get(status, "no status of ours; something else ended it")


class _Output(threading.Thread):
    """Passes on what a process prints."""

    def __init__(self, lines: IO[bytes], log: Path):
        super().__init__(name="output", daemon=True)
        self._lines = lines
        self._log = log.open("ab")

    def run(self) -> None:
        with self._log as log:
            for line in self._lines:
                with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that left: the run goes on
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()
                with contextlib.suppress(OSError):
                    log.write(line)
                    log.flush()


def _tell_ranks(torchrun: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal past torchrun, which would kill the ranks 30 s later; whether there were any."""
    told = False
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in psutil.Process(torchrun.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
                told = True
    return told
