"""Program that checks the cores of a host or one of its devices, or is one of the ranks that exchange in their groups.

A product of whole numbers, whose sums are exact in any order, is compared with the one in float64; a product of random
numbers is compared bit for bit with its repeats here, and by its digest with those of equal hardware elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megatron.launch.doctor.facts import RESULT, plain
from megatron.launch.doctor.replies import DeviceChecks, ProductCheck
from megatron.measuring.stopwatch import copies, measure, synchronise
from megatron.parallel.operators.products import mm
from megatron.runtime.devices import find_device

SEED = 37
WINDOWS = 3
"""Windows of repeats, of which the fastest counts: other work disturbs a window, and makes none faster."""
EXACT_LENGTH = 512
"""Inner length of the product of whole numbers: every partial sum stays below 256, which bfloat16 holds exactly."""
EXACT_WIDTH = 1024
MEMORY_ROUNDS = 3


class Products:
    """Products of a device, whose operands are equal on all hosts."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype) -> None:
        self._device, self._size = device, size
        # on the host: a device's own generator gives other numbers
        generator = torch.Generator().manual_seed(SEED)
        self._a, self._b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
        width = min(size, EXACT_WIDTH)
        factors = torch.randint(-4, 5, (width, EXACT_LENGTH), generator=generator)
        signs = torch.randint(-1, 2, (EXACT_LENGTH, width), generator=generator)
        kept = torch.rand(EXACT_LENGTH, width, generator=generator) < 1 / 8
        self._whole = factors.to(device, dtype), (signs * kept).to(device, dtype)
        self.expected = factors.double() @ (signs * kept).double()

    def check(self, name: str, seconds: float) -> ProductCheck:
        """Return rate and verdicts of the device, or of the core that this process is bound to."""
        # of a core by the time that this thread had it: other work on the host takes time, and does not make it slower
        clock = time.thread_time if self._device.type == "cpu" else time.perf_counter
        first = self.multiply(self._a, self._b)
        repeats, flops = True, 0.0
        for _ in range(WINDOWS):
            runs, taken = 0, 0.0
            while taken < seconds:
                begin = clock()
                result = self.multiply(self._a, self._b)
                synchronise(self._device)
                taken += clock() - begin
                runs += 1
                repeats = repeats and torch.equal(first, result)
            flops = max(flops, 2 * self._size**3 * runs / taken)
        is_exact = torch.equal(self.multiply(*self._whole).cpu().double(), self.expected)
        return ProductCheck(plain(name), flops, repeats, _digest(first), is_exact)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a product through the project's seam."""
        return mm(a, b)


def _digest(result: Tensor) -> str:
    numbers = result.cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def check_cores(seconds: float) -> DeviceChecks:
    """Return the checks of each core that this process may use, one after the other, and of the host's memory."""
    torch.set_num_threads(1)
    products, found = Products(torch.device("cpu"), 256, torch.float32), []
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for core in cores:
        if len(cores) > 1:
            os.sched_setaffinity(0, {core})
        found.append(products.check(f"core {core}", seconds))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores)
    return DeviceChecks(tuple(found), (host_memory_rate(2**26),))


def check_device(name: str, local_rank: int, seconds: float, size: int) -> DeviceChecks:
    """Return the checks of an accelerator."""
    from deepspeed.accelerator import get_accelerator

    from megatron.runtime.accelerator import choose_device

    chosen = choose_device(name)
    get_accelerator().set_device(local_rank)
    device = torch.device(get_accelerator().current_device_name())
    # operands and result, of two bytes a number
    products = Products(device, max(1, math.isqrt(size // 6) // 256) * 256, torch.bfloat16)
    found = products.check(f"{find_device(chosen).name} {local_rank}", seconds)
    return DeviceChecks((found,), (memory_rate(device, size),))


def memory_rate(device: torch.device, size: int) -> float:
    """Return the bytes a second that are copied within the memory of a device."""
    cases = [case for case in copies((size,), device) if case.key == ("copy", size)]
    measure(cases, device, MEMORY_ROUNDS, lambda share: None)
    return size / min(cases[0].seconds)


def host_memory_rate(size: int) -> float:
    """The same of one thread in the memory of the host, by the time that it had a core."""
    (case,) = copies((size,), torch.device("cpu"))
    seconds = []
    for _ in range(MEMORY_ROUNDS):
        for run in case.prepare():
            run()
            begin = time.thread_time()
            run()
            seconds.append(time.thread_time() - begin)
    return size / min(seconds)


def exchange(name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Exchange in the groups of a layout, as the rank that the environment says; return the seconds of all groups.

    `sizes`: tensor, context and pipeline.
    """
    import torch.distributed as dist

    from megatron.measuring.exchanges import group_times
    from megatron.options.config import ParallelConfig
    from megatron.parallel.context import ParallelContext
    from megatron.runtime.accelerator import choose_device

    device = choose_device(name)
    tensor, context, stages = sizes
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, pipeline_model_parallel_size=stages
    )
    ctx = ParallelContext.build(parallel, device)
    try:
        found = group_times(ctx, is_host=find_device(device).is_host)
        dist.barrier(group=ctx.control_group)
    finally:
        dist.destroy_process_group()
    # one rank says it for all
    return {"groups": found if ctx.rank == 0 else []}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.launch.doctor.device_program", allow_abbrev=False)
    parser.add_argument("--device", required=True)
    parser.add_argument("--local-rank", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--bytes", type=int, default=2**28)
    parser.add_argument("--groups", type=int, nargs=3, metavar=("TENSOR", "CONTEXT", "STAGES"))
    given = parser.parse_args(list(arguments))
    if given.groups is not None:
        found = exchange(given.device, given.groups)
    elif find_device(given.device).is_host:
        found = asdict(check_cores(given.seconds))
    else:
        found = asdict(check_device(given.device, given.local_rank, given.seconds, given.bytes))
    sys.stdout.buffer.write(b"\n" + RESULT + json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
