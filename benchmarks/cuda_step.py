"""The aims of a step on one CUDA GPU, in one call of at most eight minutes: bf16, fp8, and compiled transformers.

    python benchmarks/cuda_step.py
    python benchmarks/cuda_step.py --sections plan     # the plan's time of a step beside the measured one
    python benchmarks/cuda_step.py --device cpu        # tiny, emulated: whether the script runs

Llama 3.2 1B, sequence 4,096, in microbatches of 2, as `step.py` has it. First the rates: tokens/s and MFU of each side,
one after the other; then the losses of bf16 and fp8 over 300 steps on the same text (the bytes of this repository's own
pages and sources, so that no data need be there), from the weights that as many steps in bf16 gave: before these the
loss falls so steeply that bf16's own differ by 15 % between seeds. Aims: fp8 with scales by tensors or by rows 1.25
times the tokens/s of bf16, bf16 1.1 times those of compiled transformers at an MFU of 57 %, and mean losses of the last
30 steps within 1 %. `plan`: steps of other sizes and models within 5 % of what the chip's published rates predict. Exit
status 1 if an aim is missed, on CUDA alone. Further flags are options of a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.alternating import positive, spread
from benchmarks.step import MeasuredSide, device_peak, timed, workload

if TYPE_CHECKING:
    import torch

    from benchmarks.step_sides import Workload

FP8 = {"tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise", "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise"}
AIMS = {"fp8": 1.25, "transformers": 1.1, "mfu": 0.57, "loss": 0.01, "plan": 0.05}
PLANNED = {
    "Llama 1B": ("llama", ""),
    "rows of 2,048 tokens": ("llama", "--seq-length 2048 --micro-batch-size 4"),
    "rows of 8,192 tokens": ("llama", "--seq-length 8192 --micro-batch-size 1"),
    "microbatches of 1": ("llama", "--micro-batch-size 1"),
    "all recomputed": ("llama", "--recompute-granularity full"),
    "attention recomputed": ("llama", "--recompute-granularity selective"),
    "LoRA of rank 16": ("llama", "--lora-rank 16 --lora-target-modules all-linear"),
    "4 layers of Llama 8B": ("llama", "--config llama31_8b --num-layers 4"),
    "fp8 by tensors": ("llama", FP8["tensorwise"]),
    "fp8 by rows": ("llama", FP8["rowwise"]),
    "Bloom 1.7B": ("bloom", ""),
}
"""Cases of the plan: a model of step.py, and what differs from its flags."""
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 128 "
    "--vocab-size 512 --seq-length 64 --micro-batch-size 2 --global-batch-size 4"
)
LAST = 30
"""Steps of which a mean loss is taken."""
WARM_UP = 20
LR = 3e-4


def main() -> int:
    options, flags = _parser().parse_known_args()

    from megatron.runtime import accelerator

    device = accelerator.choose_device(options.device)
    import torch

    from megatron.parallel.context import ParallelContext

    on_cuda = device == "cuda"
    if not on_cuda:
        flags = [*TINY.split(), "--fp8-emulate", *flags]
        options.steps = min(options.steps, 3)
    began_s = time.perf_counter()
    ctx = ParallelContext.build(_workload(device, "", flags).config.parallel, device)
    peak = device_peak(ctx.device, "bf16")
    name = torch.cuda.get_device_name() if on_cuda else "CPU, emulated"
    print(f"torch {torch.__version__}, {name}; peak for MFU, TFLOP/s: {peak:.3g}", flush=True)
    missed = []
    if "rate" in options.sections:
        missed += _rates(options, ctx, flags, peak)
    if "loss" in options.sections:
        missed += _losses(options, ctx, flags)
    if "plan" in options.sections:
        missed += _plan(options, ctx, flags)
    print(f"{time.perf_counter() - began_s:.0f} s in all")
    for aim in missed:
        print(f"missed: {aim}")
    torch.distributed.destroy_process_group()
    return 1 if missed and on_cuda else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The aims of a step on one CUDA GPU.", allow_abbrev=False)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--sections", nargs="+", default=["rate", "loss"], choices=("rate", "loss", "plan"))
    parser.add_argument("--recipes", nargs="+", default=list(FP8), choices=tuple(FP8), help="of the rates")
    parser.add_argument("--loss-recipe", default="tensorwise", choices=tuple(FP8), help="of the losses")
    parser.add_argument("--rounds", type=positive, default=5, help="measurements of a side (default: 5)")
    parser.add_argument("--steps", type=positive, default=300, help="of the losses (default: 300)")
    return parser


def _workload(device: str, fp8: str, flags: list[str]) -> Workload:
    # emulation is idle without fp8, and refused by no rule
    given = [word for word in flags if fp8 or word != "--fp8-emulate"]
    return workload("llama", device, "bf16", [*given, *fp8.split()])


def _rates(options: Any, ctx: Any, flags: list[str], peak: float) -> list[str]:
    """Print the rate of each side; return the aims that are missed."""
    from benchmarks.step_sides import PEERS, Ours
    from megatron.plan.flops import flops_per_token

    device = ctx.device.type
    works = {"bf16": _workload(device, "", flags)} | {
        recipe: _workload(device, FP8[recipe], flags) for recipe in options.recipes
    }
    sides: dict[str, Any] = {name: partial(Ours, work, ctx) for name, work in works.items()}
    plain = works["bf16"]
    try:
        import transformers  # noqa: F401  # whether it is there

        how = {"is_compiled": device == "cuda", "is_autocast": False}
        sides["transformers"] = partial(PEERS["transformers"], plain, ctx.device, **how)
    except ImportError as error:
        print(f"transformers cannot be imported ({error}); pip install transformers")
    flops, rates = flops_per_token(plain.config), {}
    print(f"{'side':14s} {'tokens/s':>26s} {'ms a step':>11s} {'MFU':>7s} {'peak GiB':>9s}  loss, first to last")
    for name, build in sides.items():
        side = MeasuredSide(build, plain, device == "cuda")
        seconds = [timed(side, 2)() for _ in range(options.rounds)]
        found = [plain.num_tokens / each for each in seconds]
        rates[name] = statistics.median(found)
        print(
            f"{name:14s} {spread(found, 0):>26s} {statistics.median(seconds) * 1000:11.1f} "
            f"{rates[name] * flops / peak / 1e12:7.1%} {side.peak_bytes / 2**30:9.2f}  "
            f"{side.first_loss:.3f} to {side.losses[-1]:.3f}",
            flush=True,
        )
        side.close()
    return list(_missed_rates(rates, flops / peak / 1e12))


def _missed_rates(rates: dict[str, float], mfu_of_rate: float) -> Iterator[str]:
    for name, rate in rates.items():
        if name in FP8:
            print(f"fp8 {name} / bf16: {rate / rates['bf16']:.3f} times the tokens/s")
            if rate < AIMS["fp8"] * rates["bf16"]:
                yield f"fp8 {name} at {AIMS['fp8']} times bf16"
    if "transformers" not in rates:
        yield "compiled transformers, which are not there"
    else:
        ratio = rates["bf16"] / rates["transformers"]
        print(f"bf16 / compiled transformers: {ratio:.3f} times the tokens/s")
        if ratio < AIMS["transformers"]:
            yield f"bf16 at {AIMS['transformers']} times compiled transformers"
    if rates["bf16"] * mfu_of_rate < AIMS["mfu"]:
        yield f"bf16 at an MFU of {AIMS['mfu']:.0%}"


def _losses(options: Any, ctx: Any, flags: list[str]) -> list[str]:
    """Print the losses in bf16 and fp8 on the same text, from the same weights; return the aim if it is missed."""
    works = {
        name: _workload(ctx.device.type, fp8, [*flags, "--global-batch-size", "4"])
        for name, fp8 in (("bf16", ""), (options.loss_recipe, FP8[options.loss_recipe]))
    }
    beginning = _trained(options.steps, ctx, works["bf16"])
    _print_losses("before", beginning.losses)
    means = {}
    for name, work in works.items():
        means[name] = _print_losses(name, _trained(options.steps, ctx, work, beginning).losses)
    apart = means[options.loss_recipe] / means["bf16"] - 1
    print(f"fp8 {options.loss_recipe}: mean loss {apart:+.2%} beside that of bf16")
    return [f"fp8's loss within {AIMS['loss']:.0%}"] if abs(apart) > AIMS["loss"] else []


def _print_losses(name: str, losses: list[float]) -> float:
    """Print ten of them; return the mean of the last."""
    mean = statistics.mean(losses[-LAST:])
    shown = " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(losses) // 10)])
    print(f"{name}: losses {shown}; mean of the last {min(LAST, len(losses))}: {mean:.4f}", flush=True)
    return mean


class Trained(NamedTuple):
    """Losses of steps, and the float32 weights after them, on the host."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def _trained(steps: int, ctx: Any, work: Workload, beginning: Trained | None = None) -> Trained:
    """Train that many steps on the text of this repository, on other samples than the beginning's, if there is one."""
    import gc

    import torch

    from megatron.tasks.pretrain import PretrainTask
    from megatron.training.build import build_engine

    training, text = work.config.training, _text()
    task = PretrainTask(work.config)
    engine: Any = build_engine(work.config, ctx, task)
    if beginning is not None:
        engine.state.set_weights({name: weight.to(ctx.device) for name, weight in beginning.weights.items()})
    generator, losses = torch.Generator().manual_seed(1 if beginning is None else 2), []
    for step in range(steps):
        starts = torch.randint(len(text) - training.seq_length - 1, (training.global_batch_size,), generator=generator)
        tokens = torch.stack([text[start : start + training.seq_length + 1] for start in starts])
        batch = [task.data.collate(part.numpy()) for part in tokens.split(training.micro_batch_size)]
        rate = LR * min(1.0, (step + 1) / WARM_UP)
        losses.append(engine.train_step(batch, consumed_samples=step * len(tokens), lr=rate).loss)
    weights = {name: owned.weight.cpu().clone() for name, owned in engine.state.trained_slices().items()}
    del engine, task
    gc.collect()
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
    return Trained(losses, weights)


def _plan(options: Any, ctx: Any, flags: list[str]) -> list[str]:
    """Print the predicted and the measured time of each planned case; return the aim if one misses it."""
    from benchmarks.step_sides import Ours
    from megatron.observability.prediction import detected_machine
    from megatron.plan.rates.files import load_rates
    from megatron.plan.timing.cluster import Cluster
    from megatron.plan.timing.step import step_time
    from megatron.runtime import accelerator
    from megatron.runtime.devices import device_of

    device, missed = ctx.device.type, []
    machine = detected_machine(device_of(device), accelerator.current().chip_name())
    if machine is None:
        print("plan: this chip has no published rates")
        return ["the plan of a chip without published rates"]
    rates = load_rates(machine)
    for name, (model, own) in PLANNED.items():
        work = workload(model, device, "bf16", [*own.split(), *flags])
        predicted_s = step_time(work.config, Cluster((1,)), rates).seconds
        side = MeasuredSide(partial(Ours, work, ctx), work, device == "cuda")
        measured_s = statistics.median(timed(side, 1)() for _ in range(options.rounds))
        side.close()
        ratio = predicted_s / measured_s
        print(
            f"{name:22s} {predicted_s * 1e3:8.1f} ms predicted, {measured_s * 1e3:8.1f} measured: {ratio:.3f}",
            flush=True,
        )
        if abs(ratio - 1) > AIMS["plan"]:
            missed.append(f"the plan of {name} within {AIMS['plan']:.0%}")
    return missed


def _text() -> Any:
    """Return the bytes of the pages and sources of this repository as token ids, int64."""
    import numpy as np
    import torch

    root = Path(__file__).resolve().parent.parent
    files = [
        path for folder in ("docs", "megatron") for kind in ("*.md", "*.py") for path in (root / folder).rglob(kind)
    ]
    joined = b"".join(path.read_bytes() for path in sorted(files))
    return torch.from_numpy(np.frombuffer(joined, np.uint8).astype(np.int64))


if __name__ == "__main__":
    sys.exit(main())
