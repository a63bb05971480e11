"""A training step of ours beside transformers' and litgpt's: speed, memory, profile, waits and collectives.

    OMP_NUM_THREADS=2 python benchmarks/step.py
    python benchmarks/step.py --device cuda --sections rate profile counts

Same shapes, same batch; forward, backward, clipping and fused AdamW with float32 weights; ours is the engine of a real
run. All sides alternate in one process. On a CPU: 34M parameters (8 layers, hidden 512), sequence 512, batch 4. On
CUDA: Llama 3.2 1B and Bloom 1.7B, sequence 4,096, the peers under torch.compile, one side after the other. Further
flags are options of a run and change ours and the shapes, as `--num-layers 4 --micro-batch-size 2`.

Sections: rate (tokens/s, ratio, MFU, peak memory, first and last loss), profile (the ten largest operators of each
side), counts (waits and collectives of one of our steps), flat (time and work of a microbatch among 8 and among 64, and
of a step after 10 and after 1,000). MFU is 6 N + 12 L A D S FLOPs a token (megatron/plan/flops.py), over the
device's published bfloat16 peak; on a CPU over a matrix product measured here. Peak memory is what a side adds, in its
build and two steps, on a CPU to a process of its own: in a shared one it fills what another has freed, and seems small.
Exit status 1 if ours has less than 1.2 times the tokens/s of transformers or 1.05 times litgpt's, on CUDA 1.1
and 1.05 times. litgpt and transformers are used where they are installed; transformers is in the extra `convert`:

    pip install litgpt==0.5.13
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import alternate, on_ranks, positive, quotients, spread

if TYPE_CHECKING:
    from benchmarks.step_sides import Side, Workload

PEER_NAMES = ("transformers", "litgpt")
CPU_AIMS = {"transformers": 1.2, "litgpt": 1.05}
CUDA_AIMS = {"transformers": 1.1, "litgpt": 1.05}
SECTIONS = ("rate", "profile", "counts", "flat")
SMALL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --vocab-size 16384 "
    "--seq-length 512 --micro-batch-size 4 --global-batch-size 4"
)
TIED = "--no-untie-embeddings-and-output-weights"
SHAPES = {
    ("llama", "cpu"): f"--config tiny_llama {SMALL} --ffn-hidden-size 1536 --num-query-groups 4 {TIED}",
    ("bloom", "cpu"): f"--config tiny_bloom {SMALL}",
    ("llama", "cuda"): "--config llama32_1b --seq-length 4096 --micro-batch-size 2 --global-batch-size 8",
    # without dropout, as the published model
    ("bloom", "cuda"): "--config bloom_1b7 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 "
    "--hidden-dropout 0 --attention-dropout 0",
}
FLAT = "--config tiny_llama --num-layers 2 --seq-length 64 --micro-batch-size 1"


def main() -> int:
    options, flags = _parser().parse_known_args()

    from megatron.runtime import accelerator

    device = accelerator.choose_device(options.device)
    if options.precisions is None:
        options.precisions = ["bf16"] if device == "cuda" else ["bf16", "fp32"]
    if options.alone is None:
        options.alone = device == "cuda"
    import torch

    from megatron.parallel.context import ParallelContext

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    first = workload("llama", device, "fp32", flags)
    ctx = ParallelContext.build(first.config.parallel, device)
    on_cpu = f"{accelerator.processor()}, {torch.get_num_threads()} threads"
    threads = on_cpu if device == "cpu" else torch.cuda.get_device_name()
    peak_tflops = {p: device_peak(ctx.device, p) for p in options.precisions}
    peaks = ", ".join(f"{p} {peak:.3g}" for p, peak in peak_tflops.items())
    print(f"torch {torch.__version__}, {threads}; peak for MFU, TFLOP/s: {peaks}", flush=True)
    reached = True
    for model in options.models if set(options.sections) != {"flat"} else ():
        for precision in options.precisions:
            work = workload(model, device, precision, flags)
            peers = _peers(options.peers, model)
            title = f"{model} {precision}"
            reached &= _compare(work, ctx, peers, title, options, peak_tflops[precision])
    if "flat" in options.sections:
        _flat(ctx, device)
    torch.distributed.destroy_process_group()
    return 0 if reached else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A training step of ours beside its peers.", allow_abbrev=False)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--models", nargs="+", default=["llama", "bloom"], choices=("llama", "bloom"))
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), help="default: bf16 fp32; on CUDA bf16")
    parser.add_argument("--peers", nargs="*", default=list(PEER_NAMES), choices=PEER_NAMES)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--rounds", type=positive, default=7, help="alternations (default: 7)")
    parser.add_argument("--steps", type=positive, default=2, help="steps a round (default: 2)")
    parser.add_argument(
        "--alone",
        action=argparse.BooleanOptionalAction,
        help="one side in memory at a time, one after the other, instead of in turn (default: on CUDA)",
    )
    parser.add_argument(
        "--peer-precision",
        choices=("masters", "autocast"),
        default="masters",
        help="bf16 peers: 16-bit weights with float32 copies, or float32 weights under autocast (default: masters)",
    )
    parser.add_argument(
        "--compile-peers", action=argparse.BooleanOptionalAction, help="torch.compile them (default: on CUDA)"
    )
    return parser


def workload(model: str, device: str, precision: str, flags: list[str]) -> Workload:
    """The model's shapes on this kind of device, with the user's own flags last, and random tokens."""
    import torch

    from benchmarks.step_sides import Workload
    from megatron.settings.command_line import parse_arguments

    own = SHAPES[model, device].split()
    fixed = ["--bf16" if precision == "bf16" else "--no-bf16", "--device", device, "--data-path", "none"]
    config, _ = parse_arguments([*own, *fixed, *flags])
    generator = torch.Generator().manual_seed(0)
    shape = (config.training.global_batch_size, config.training.seq_length + 1)
    return Workload(config, torch.randint(config.model.vocab_size, shape, generator=generator))


def _peers(wanted: list[str], model: str) -> list[str]:
    """The peers that are there, by name."""
    found = []
    for name in wanted:
        if name == "litgpt" and model == "bloom":
            print("bloom: litgpt has no ALiBi")
            continue
        try:
            importlib.import_module({"litgpt": "litgpt.model"}.get(name, name))
            found.append(name)
        except ImportError as error:
            print(f"{model}: {name} cannot be imported ({error}); pip install {name}")
    return found


def _compare(work: Workload, ctx: Any, peers: list[str], title: str, options: Any, peak_tflops: float) -> bool:
    """Measure ours and its peers, and print all sections; return True if the aims are reached."""
    on_cuda = ctx.device.type == "cuda"
    builders = {name: _builder(name, work, ctx, options) for name in ("ours", *peers)}
    print(f"\n## {title}: {', '.join(builders)}", flush=True)
    measured: dict[str, list[float]] = {}
    sides: dict[str, MeasuredSide] = {}
    for group in [[name] for name in builders] if options.alone else [list(builders)]:
        live: dict[str, MeasuredSide] = {}
        for name in group:
            try:
                live[name] = MeasuredSide(builders[name], work, on_cuda)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                if "out of memory" not in str(error):
                    raise
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)
        sides |= live
        if "rate" in options.sections:
            rounds = {name: timed(side, options.steps) for name, side in live.items()}
            measured |= alternate(rounds, options.rounds)
        for name, side in live.items():
            show_details(name, side, options)
            side.close()
    if "rate" not in options.sections:
        return True
    peaks = {name: side.peak_bytes for name, side in sides.items()}
    if not on_cuda:
        peaks = {name: on_ranks(_peak_alone, 1, name, work, options) for name in sides}
    return _show_rates(work, sides, measured, peaks, peak_tflops, on_cuda)


def _builder(name: str, work: Workload, ctx: Any, options: Any) -> Callable[[], Side]:
    """Return what builds a side, all that it imports imported."""
    if name == "ours":
        return builder(name, work, ctx)
    on_cuda = ctx.device.type == "cuda"
    is_compiled = on_cuda if options.compile_peers is None else options.compile_peers
    return builder(name, work, ctx, is_compiled=is_compiled, is_autocast=options.peer_precision == "autocast")


def builder(
    name: str, work: Workload, ctx: Any, *, is_compiled: bool = False, is_autocast: bool = False
) -> Callable[[], Side]:
    """Import the modules of a side, which no measurement of its memory counts, and return what builds it."""
    from benchmarks.step_sides import PEERS, Ours

    side = Ours if name == "ours" else PEERS[name]
    for module in side.modules:
        importlib.import_module(module)
    if name == "ours":
        return partial(Ours, work, ctx)
    return partial(PEERS[name], work, ctx.device, is_compiled=is_compiled, is_autocast=is_autocast)


def _peak_alone(_index: int, _port: int, name: str, work: Workload, options: Any, results: Any) -> None:
    """Put the bytes that a side on the CPU adds to this process, which holds its imports before."""
    import torch

    from megatron.parallel.context import ParallelContext

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    ctx = ParallelContext.build(work.config.parallel, "cpu")
    results.put(MeasuredSide(_builder(name, work, ctx, options), work, on_cuda=False).peak_bytes)


class MeasuredSide:
    """A side after its first steps, in which it allocates and compiles, and the memory that it took."""

    def __init__(self, build: Callable[[], Side], work: Workload, on_cuda: bool) -> None:
        self._on_cuda, self.num_tokens = on_cuda, work.num_tokens
        gc.collect()
        before = _reset_peak(on_cuda)
        self._side = build()
        self.first_loss = float(self._side.step())
        self.step()
        self.peak_bytes = _peak_bytes(on_cuda) - before
        self.losses: list[float] = []
        self.cpu_s: list[float] = []
        """Processor seconds of each call of `steps`."""

    def step(self) -> float:
        """A step, and the wait for its end."""
        return float(self._side.step())

    def steps(self, number: int) -> None:
        """Steps without a wait between them."""
        began_s = time.process_time()
        for _ in range(number):
            loss = self._side.step()
        self.losses.append(float(loss))
        self.cpu_s.append(time.process_time() - began_s)

    def plain_step(self) -> None:
        self._side.step()

    def close(self) -> None:
        self._side.close()
        del self._side
        gc.collect()
        if self._on_cuda:
            import torch

            torch.cuda.empty_cache()


def timed(side: MeasuredSide, steps: int) -> Callable[[], float]:
    def seconds() -> float:
        began_s = time.perf_counter()
        side.steps(steps)
        return (time.perf_counter() - began_s) / steps

    return seconds


def show_details(name: str, side: MeasuredSide, options: Any) -> None:
    from benchmarks.step_counts import counted, largest_operators

    if "counts" in options.sections and name == "ours":
        counts = counted(side.plain_step)
        for title, counter in (
            ("waits", counts.waits),
            ("operations that CUDA reports as synchronising", counts.device_syncs),
            ("collectives", counts.collectives),
        ):
            listed = ", ".join(f"{key} x{number}" for key, number in counter.most_common(12))
            print(f"{name}: {sum(counter.values())} {title} a step{': ' if listed else ''}{listed}")
    if "profile" in options.sections:
        print(f"{name}: largest operators of a step")
        for key, milliseconds, share, calls in largest_operators(side.step):
            print(f"  {milliseconds:9.2f} ms {share:6.1%} {calls:6d} x  {key[:70]}")


def _show_rates(
    work: Workload, sides: Any, measured: Any, peaks: dict[str, int], peak_tflops: float, on_cuda: bool
) -> bool:
    """Print the table; return True if ours is as much faster than each peer as is aimed at."""
    from megatron.plan.flops import count_parameters, flops_per_token

    flops, reached = flops_per_token(work.config), "ours" in measured  # not where it ran out of memory
    training = work.config.training
    print(
        f"{count_parameters(work.config) / 1e6:.4g}M parameters, sequence {training.seq_length}, "
        f"{training.global_batch_size} samples a step in microbatches of {training.micro_batch_size}"
    )
    print(f"{'side':14s} {'tokens/s':>26s} {'ms a step':>11s} {'MFU':>7s} {'peak GiB':>9s}  loss, first to last")
    for name, times in measured.items():
        rates = [work.num_tokens / seconds for seconds in times]
        mfu = statistics.median(rates) * flops / peak_tflops / 1e12
        print(
            f"{name:14s} {spread(rates, 0):>26s} {statistics.median(times) * 1000:11.1f} {mfu:7.1%} "
            f"{peaks[name] / 2**30:9.2f}  {sides[name].first_loss:.3f} to {sides[name].losses[-1]:.3f}"
        )
    for name in measured:
        if name == "ours" or "ours" not in measured:
            continue
        # processor time: other work on a busy machine disturbs it less
        in_cpu = spread(quotients(sides[name].cpu_s, sides["ours"].cpu_s))
        ratio = spread(quotients(measured[name], measured["ours"]))
        print(f"ours / {name}: {ratio} times the tokens/s; by processor time {in_cpu}", flush=True)
        aim = CUDA_AIMS if on_cuda else CPU_AIMS
        reached &= statistics.median(quotients(measured[name], measured["ours"])) >= aim[name]
    return reached


def _flat(ctx: Any, device: str) -> None:
    """Print the time of a microbatch among 8 and 64 of a step, and of a step among the first and last 100 of 1,000."""
    import torch

    from benchmarks.step_counts import counted_work, live_objects
    from benchmarks.step_sides import Ours, Workload
    from megatron.settings.command_line import parse_arguments

    config, _ = parse_arguments([*FLAT.split(), "--global-batch-size", "64", "--device", device, "--data-path", "none"])
    tokens = torch.randint(config.model.vocab_size, (64, config.training.seq_length + 1))
    side = Ours(Workload(config, tokens), ctx)
    clock = time.perf_counter if device == "cuda" else time.process_time  # a CPU may have other work

    def seconds(num_microbatches: int, repeats: int) -> float:
        """Return the seconds of one step."""
        began_s = clock()
        for _ in range(repeats):
            float(side.step(num_microbatches))
        return (clock() - began_s) / repeats

    # what all numbers share, such as the update, is subtracted
    counts = {"1": 16, "8": 8, "64": 1}
    times = alternate({n: partial(seconds, int(n), repeats) for n, repeats in counts.items()}, 9)
    each = {n: [(t - one) / (int(n) - 1) for t, one in zip(times[n], times["1"], strict=True)] for n in ("8", "64")}
    print("\n## flat cost (a small Llama)")
    print(f"a microbatch among 64, to one among 8: {spread(quotients(each['64'], each['8']))}")
    work = {n: counted_work(lambda: side.step(n)) for n in (1, 8, 64)}  # noqa: B023  # called at once
    for fewer, more in ((1, 8), (8, 64)):
        calls, operators = ((b - a) / (more - fewer) for a, b in zip(work[fewer], work[more], strict=True))
        print(f"a further microbatch, {fewer} to {more}: {calls:g} calls in Python, {operators:g} operators")
    before, objects = counted_work(lambda: side.step(1)), live_objects()
    steps = [seconds(1, 1) for _ in range(1000)]
    early, late = statistics.median(steps[10:110]), statistics.median(steps[900:])
    after, objects = counted_work(lambda: side.step(1)), live_objects() - objects
    for when, (calls, operators) in (("at first", before), ("after 1,000", after)):
        print(f"a step {when}: {calls} calls in Python, {operators} operators")
    print(f"objects that 1,000 steps leave: {objects}")
    print(f"steps 900 to 1,000, to steps 10 to 110: {late / early:.3f} ({late * 1000:.2f} and {early * 1000:.2f} ms)")
    side.close()


def device_peak(device: Any, precision: str) -> float:
    """The device's published bfloat16 peak; on a CPU the best of ten matrix products in the precision."""
    import torch

    from megatron.parallel.operators import products
    from megatron.runtime import accelerator

    if (published := accelerator.peak_tflops()) is not None:
        return published
    dtype, size = (torch.bfloat16 if precision == "bf16" else torch.float32), 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times = []
    for _ in range(10):
        began_s = time.perf_counter()
        float(products.mm(a, b)[0, 0])
        times.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(times) / 1e12


def _reset_peak(on_cuda: bool) -> int:
    """Begin to measure the peak again; return the bytes in use now."""
    if on_cuda:
        import torch

        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident set
    return _status_bytes("VmRSS")


def _peak_bytes(on_cuda: bool) -> int:
    if on_cuda:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
