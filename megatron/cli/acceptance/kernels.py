"""Compare each of Habana's kernels with its plain twin on one card: `python -m megatron.cli.acceptance.kernels FILE`.

Appends a JSON object a check to FILE as soon as it is known: a kernel that ends the process leaves those before it.

Shapes: S sequence, B batch, n query heads, k key/value heads, d head size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.acceptance.report import Check, read_rows
from megatron.runtime.commands import DONE, REFUSED

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bounds of the largest difference, relative to the largest value of the result in float64. bfloat16 keeps 8 bits, so
# one rounding is 0.004; attention rounds the scores, the probabilities and their gradients.
FLOAT32, BFLOAT16, BFLOAT16_ATTENTION = 1e-4, 0.01, 0.03
S, B, HEADS, HEAD_SIZE, HIDDEN = 256, 2, 8, 64, 512

Results = list[Any]
"""Tensors of one computation: values, then gradients."""


def difference(actual: Results, expected: Results) -> float:
    """Return the largest of the tensors' differences, each relative to its largest expected number."""
    # relative to the largest number: one that is almost 0 has no meaningful relative error
    return max(
        float((a.detach().cpu().double() - e.detach().double()).abs().max() / e.detach().abs().max())
        for a, e in zip(actual, expected, strict=True)
    )


def with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor], device: str, dtype: torch.dtype) -> Results:
    """Return what `function` computes of copies of the inputs, and their gradients of a fixed sum of it."""
    import torch

    copies = [x.clone().to(device=device, dtype=dtype).requires_grad_() for x in inputs]
    found = function(*copies)
    outputs = list(found) if isinstance(found, tuple) else [found]
    # different weights: in a plain sum errors of two places could cancel
    weights = [torch.linspace(-1.0, 1.0, x.numel()).view(x.shape) for x in outputs]
    sum((x.float() * w.to(device)).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    return [*outputs, *(copy.grad for copy in copies)]


def numbers(*shape: int, seed: int) -> Tensor:
    """Return random numbers that bfloat16 holds exactly, so that all forms start from the same."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def attention(
    dtype: torch.dtype, *, groups: int, alibi: bool = False, packed: bool = False, fast: bool = False, recompute: bool
) -> float:
    import torch

    from megatron.models.attention.kernels import FusedHPUAttention, SDPAttention
    from megatron.models.attention.scores import Scores
    from megatron.models.positions import Packing, alibi_slopes

    inputs = [numbers(B, heads, S, HEAD_SIZE, seed=n) for n, heads in enumerate((HEADS, groups, groups))]
    slopes = alibi_slopes(HEADS) if alibi else None
    # (B, S): each token's first position of its document, of 100 tokens each
    starts = torch.arange(S).div(100, rounding_mode="floor").mul(100).repeat(B, 1)
    packing = Packing(torch.arange(S) - starts, starts) if packed else None
    on_device = None if packing is None else Packing(packing.positions_BS.to("hpu"), packing.starts_BS.to("hpu"))
    kernel = FusedHPUAttention(Scores(slopes), fast_softmax=fast, recompute=recompute)
    plain = SDPAttention(Scores(slopes), repeats=True)
    return difference(
        with_gradients(lambda q, k, v: kernel(q, k, v, on_device, 0.0), inputs, "hpu", dtype),
        with_gradients(lambda q, k, v: plain(q, k, v, packing, 0.0), inputs, "cpu", torch.float64),
    )


def rotary(dtype: torch.dtype) -> float:
    import torch

    from megatron.parallel.operators.fused import PLAIN, habana

    inputs = [numbers(S, B, heads, HEAD_SIZE, seed=heads) for heads in (HEADS, 2)]
    # (S, 1, 1, d/2): position x 10000^(-2i/d)
    angles = torch.outer(torch.arange(S), 10000 ** -(torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2)))[:, None, None]
    cos, sin = angles.cos(), angles.sin()
    fused = habana(fused_norm=True).rotate
    cos_there, sin_there = cos.to("hpu"), sin.to("hpu")
    return difference(
        with_gradients(lambda q, k: fused(q, k, cos_there, sin_there), inputs, "hpu", dtype),
        with_gradients(lambda q, k: PLAIN.rotate(q, k, cos, sin), inputs, "cpu", torch.float64),
    )


def rms_norm(dtype: torch.dtype) -> float:
    import torch

    from megatron.parallel.operators.fused import PLAIN, habana

    inputs = [numbers(S, B, HIDDEN, seed=1), numbers(HIDDEN, seed=2)]
    fused = habana(fused_norm=True).rms_norm
    return difference(
        with_gradients(lambda x, weight: fused(x, weight, 1e-5), inputs, "hpu", dtype),
        with_gradients(lambda x, weight: PLAIN.rms_norm(x, weight, 1e-5), inputs, "cpu", torch.float64),
    )


def adamw() -> float:
    """Difference of the change of a weight over five updates."""
    import torch
    from habana_frameworks.torch.hpex.optimizers import FusedAdamW

    start = numbers(HIDDEN, 64, seed=3)
    # the fused one adds epsilon before the bias correction, torch's after it: too small a number to show that
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.1}
    changes = []
    for cls, device, dtype in ((FusedAdamW, "hpu", torch.float32), (torch.optim.AdamW, "cpu", torch.float64)):
        weight = torch.nn.Parameter(start.clone().to(device=device, dtype=dtype))
        optimizer = cls([weight], **options)
        for step in range(5):
            weight.grad = numbers(HIDDEN, 64, seed=10 + step).to(device=device, dtype=dtype)
            optimizer.step()
        # of the weight itself a wrong change would be a small part
        changes.append([weight.detach().cpu().double() - start.double()])
    return difference(*changes)


def clip_norm() -> float:
    """Difference of the norm of three gradients, and of these after they are clipped to 1."""
    import torch
    from habana_frameworks.torch.hpex.normalization import FusedClipNorm

    results = []
    for device, dtype in (("hpu", torch.float32), ("cpu", torch.float64)):
        parameters = [torch.nn.Parameter(torch.zeros(HIDDEN, n, device=device, dtype=dtype)) for n in (1, 8, 64)]
        for n, parameter in enumerate(parameters):
            parameter.grad = numbers(*parameter.shape, seed=n).to(device=device, dtype=dtype)
        # Habana's is a class, and clips in place as torch's function does
        if device == "hpu":
            norm = FusedClipNorm(parameters, 1.0).clip_norm(parameters)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        results.append([norm.reshape(()), *(parameter.grad for parameter in parameters)])
    return difference(*results)


def comparisons() -> dict[str, tuple[Callable[[], float], float]]:
    """Return (function, tolerance) of each check by name."""
    import torch

    wide, narrow = torch.float32, torch.bfloat16
    of_attention: dict[str, dict[str, Any]] = {
        "causal": {"groups": HEADS, "recompute": True},
        "causal, 2 key/value heads": {"groups": 2, "recompute": True},
        "causal, 1 key/value head": {"groups": 1, "recompute": True},
        "causal, kept probabilities": {"groups": 2, "recompute": False},
        "causal, fast softmax": {"groups": HEADS, "recompute": True, "fast": True},
        "ALiBi by mask": {"groups": HEADS, "recompute": True, "alibi": True},
        "packed documents by mask": {"groups": 2, "recompute": True, "packed": True},
        "packed documents with ALiBi by mask": {"groups": HEADS, "recompute": True, "alibi": True, "packed": True},
    }
    found: dict[str, tuple[Callable[[], float], float]] = {}
    for name, case in of_attention.items():
        if not case.get("fast"):  # approximate by design
            found[f"FusedSDPA {name}, float32"] = (partial(attention, wide, **case), FLOAT32)
        found[f"FusedSDPA {name}, bfloat16"] = (partial(attention, narrow, **case), BFLOAT16_ATTENTION)
    for kernel, function in (("rotary embedding", rotary), ("FusedRMSNorm", rms_norm)):
        found[f"{kernel}, float32"] = (partial(function, wide), FLOAT32)
        found[f"{kernel}, bfloat16"] = (partial(function, narrow), BFLOAT16)
    found["FusedAdamW, 5 updates, float32"] = (adamw, FLOAT32)
    found["FusedClipNorm, float32"] = (clip_norm, FLOAT32)
    return found


def run_all(file: Path) -> None:
    """Run each comparison, and append what it gave to `file`. An error of one is its result."""
    found = comparisons()
    with file.open("a", encoding="utf-8") as lines:
        # first all names: of a process that a kernel has ended they say what was left
        lines.write(json.dumps({"names": {name: tolerance for name, (_, tolerance) in found.items()}}) + "\n")
        for name, (function, tolerance) in found.items():
            try:
                check = Check(name, function(), tolerance)
            except Exception as error:  # whatever it is, the report must name it
                check = Check(name, None, tolerance, f"{type(error).__name__}: {error}")
            lines.write(json.dumps(asdict(check)) + "\n")
            lines.flush()


def read_checks(file: Path, ended: str) -> list[Check]:
    """Return the checks of a process that wrote `file`; those that it did not reach failed, as `ended` says."""
    lines = read_rows(file)
    if not lines:
        return [Check("kernels", None, 0.0, ended)]
    names: dict[str, float] = lines[0]["names"]
    found = {line["name"]: Check(**line) for line in lines[1:]}
    return [found.get(name) or Check(name, None, tolerance, ended) for name, tolerance in names.items()]


def main(arguments: Iterable[str]) -> int:
    (file,) = arguments
    from megatron.runtime import accelerator

    try:
        accelerator.choose_device("hpu")
    except accelerator.DeviceError as error:
        print(error)
        return REFUSED
    run_all(Path(file))
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
