"""Cost of logging and of the guard: steps of a run that logs each step and records memory, against a run without.

    python benchmarks/reliability_overhead.py [--rounds 40] [--block 4] [--on "FLAGS"] [--off "FLAGS"] [FLAGS]

Two runs of the real training loop, each with its own engine, data, log and results folder, take turns in one process,
`--block` steps at a time, so a slow minute of the machine affects both. Their model is small and their steps are about
50 ms, which is short: what is added to a step weighs the more.

    on     logs every step to the log line, metrics.jsonl and TensorBoard, and the memory every 10th, checks each step
           for spikes before it is applied, and is watched; and `--on`
    off    one log line at the end, no memory log, no TensorBoard, no step check, no watchdog; and `--off`

FLAGS are those of megatron.train; `--on "--timing-log-level 2"` adds to what is on. Prints the median of a step on each
side, and of their ratio block by block. Exit status 1 if that is above 1.01.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import positive, quotients, spread

if TYPE_CHECKING:
    from megatron.options.config import Config
    from megatron.parallel.context import ParallelContext

LIMIT = 1.01
MODEL = (
    "--config tiny_llama --device cpu --seq-length 128 --micro-batch-size 4 --global-batch-size 4 --vocab-size 4096 "
    "--eval-iters 0 --train-samples none --lr-warmup-samples 0 --lr-decay-style constant"
)
ON = "--log-interval 1 --log-memory-interval 10 --spike-action skip --watchdog-timeout-s 60"
OFF = "--log-interval 1000000 --log-memory-interval 0 --spike-action off --watchdog-timeout-s 0"


class Turns:
    """Lets several runs take turns: only one goes on at a time, and time is taken of it alone."""

    def __init__(self, names: list[str], block: int) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        """A step, block by block."""
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
        """Likewise, of the processor: of all threads, those in the background too."""
        self._names, self._block = names, block
        self._whose = 0
        self._condition = threading.Condition()
        self._began_s = self._cpu_began_s = 0.0
        self._failed = False

    def wait(self, name: str) -> None:
        """Go on when it is this run's turn."""
        with self._condition:
            self._condition.wait_for(lambda: self._failed or self._names[self._whose] == name)
            if self._failed:
                raise RuntimeError("the other run failed")
        self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()

    def after_step(self, name: str, iteration: int) -> None:
        """Give the turn to the other side at the end of a block."""
        if iteration % self._block:
            return
        self.seconds[name].append((time.perf_counter() - self._began_s) / self._block)
        self.cpu_seconds[name].append((time.process_time() - self._cpu_began_s) / self._block)
        self.leave()
        self.wait(name)

    def leave(self, *, failed: bool = False) -> None:
        with self._condition:
            self._failed = self._failed or failed
            self._whose = (self._whose + 1) % len(self._names)
            self._condition.notify_all()


def train_in_turns(name: str, config: Config, ctx: ParallelContext, dataset: Any, turns: Turns, steps: int) -> None:
    """One run, from its engine to its last step, as megatron.train builds it."""
    from megatron.observability.memory import MemoryLog
    from megatron.observability.metrics import MetricsLog
    from megatron.options.progress import Progress
    from megatron.options.schedule import Schedule
    from megatron.resilience.shutdown import Shutdown
    from megatron.resilience.watchdog import Watchdog
    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine
    from megatron.training.loop import Loop
    from megatron.training.losses import SpikeDetector

    class Turnstile(Shutdown):
        def decide(self, progress: Progress | None = None, *, is_reason_seen: bool | None = None) -> bool:
            stops = super().decide(progress, is_reason_seen=is_reason_seen)
            if progress is not None:
                turns.after_step(name, progress.iteration)
            return stops

    turns.wait(name)
    progress = Progress()
    task = PretrainTask(config)
    engine = build_engine(config, ctx, task, SpikeDetector(config.guard, progress))
    memory = MemoryLog(config.logging, ctx)
    log = MetricsLog(config, writes=True, world_size=1, device_peak_tflops=None, total_iterations=steps)
    stop, watchdog = Turnstile(config.training, ctx), Watchdog(config)
    turns.leave()
    turns.wait(name)
    with watchdog, log, stop:
        watchdog.connect(ctx)
        memory.open(log)
        Loop(
            engine,
            task,
            (dataset, None, None),
            Schedule(config.training, config.optimizer),
            progress,
            log,
            stop,
            None,
            memory,
            watchdog,
        ).train()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Cost of logs, memory log and guards, on against off.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=positive, default=40, help="blocks of steps on each side (default: 40)")
    parser.add_argument("--block", type=positive, default=4, help="steps of a block (default: 4)")
    parser.add_argument(
        "--on", default="", metavar="FLAGS", help="more flags of megatron.train for the side that is on"
    )
    parser.add_argument("--off", default="", metavar="FLAGS", help="the same for the side that is off")
    options, flags = parser.parse_known_args()
    steps = (options.rounds + 1) * options.block  # the first block warms up

    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from megatron.parallel.context import ParallelContext
    from megatron.settings.command_line import load_config

    sides = {"on": [*ON.split(), *shlex.split(options.on)], "off": [*OFF.split(), *shlex.split(options.off)]}
    with tempfile.TemporaryDirectory() as folder:
        length = ["--data-path", "none", "--train-iters", str(steps), *flags]
        results = {"on": ["--results-dir", f"{folder}/on"], "off": []}
        configs = {name: load_config([*MODEL.split(), *length, *results[name], *sides[name]]) for name in sides}
        ctx = ParallelContext.build(configs["on"].parallel, "cpu")
        dataset = RandomTokens(configs["on"], steps)
        turns, faults = Turns(list(sides), options.block), []

        def run(name: str) -> None:
            try:
                train_in_turns(name, configs[name], ctx, dataset, turns, steps)
            except BaseException as fault:
                faults.append(fault)
                turns.leave(failed=True)
            else:
                turns.leave()

        threads = [threading.Thread(target=run, args=(name,)) for name in sides]
        # the lines are written, as to a log file, but not shown
        with open(os.path.join(folder, "log"), "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if faults:
            raise faults[0]

    seconds = {name: values[1:] for name, values in turns.seconds.items()}
    print(f"{torch.get_num_threads()} threads, {options.rounds} rounds of {options.block} steps, in turns")
    for name, values in seconds.items():
        print(f"{name:4s} {spread([1000 * value for value in values], 2)} ms a step   {' '.join(sides[name])}")
    # on a busy machine steadier than the clock
    cpu = quotients(turns.cpu_seconds["on"][1:], turns.cpu_seconds["off"][1:])
    print(f"ratio of processor time {spread(cpu)}")
    ratios = quotients(seconds["on"], seconds["off"])
    ratio = statistics.median(ratios)
    print(f"ratio {spread(ratios)}, limit {LIMIT}")
    return 0 if ratio <= LIMIT else 1


class RandomTokens:
    """As many samples as the run takes, read from memory: the same on both sides."""

    def __init__(self, config: Config, steps: int) -> None:
        import numpy as np

        training = config.training
        shape = (steps * training.global_batch_size, training.seq_length + 1)
        self._tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def get_batch(self, indices: range) -> Any:
        return self._tokens[indices.start : indices.stop : indices.step]


if __name__ == "__main__":
    sys.exit(main())
