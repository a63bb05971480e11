"""Output projection and cross-entropy, forward and backward: ours against the plain one, torch's and Liger's.

    python benchmarks/loss.py [--tokens 1024 16384] [--vocabulary 128256 250880] [--hidden 2048] [--rounds 7]

Runs in bfloat16 on the CUDA device there is, else on the CPU with smaller defaults. The sides run in turn:

- ours: `linear_cross_entropy` on one tensor-parallel rank, which adds the weight's gradient to float32 memory that the
  optimizer has in any case, so it counts with the inputs; with --chunk-tokens also with other chunks of tokens
- ours, own gradient: the same without such memory, as with ZeRO-2 and 3
- plain: all logits in bfloat16, F.cross_entropy, autograd
- plain float32: the same with the logits converted to float32 first, as transformers and Megatron do
- torch: F.linear_cross_entropy in chunks (torch 2.13)
- liger: liger-kernel's fused linear cross-entropy, where it is installed (CUDA)

Prints for each side the median time, its ratio to plain round by round, the peak of memory above the inputs with both
gradients included (on the CPU as torch's operators return it), and the largest errors of the loss, the gradient of the
hidden states and that of the weight against float64, relative to the largest number. Error in the gradients is measured
on the first 256 tokens and 256 rows of the vocabulary.

Exit status 1 if ours takes more than 1.05 times plain's time, or, from 16,384 tokens on, more than 1/20 of its memory.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.alternating import alternate, positive, quotients, spread
from benchmarks.live_bytes import LiveBytes
from benchmarks.step_counts import largest_operators
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import linear_cross_entropy
from megatron.parallel.operators import block_sizes
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.shards import Shard

TIME_LIMIT = 1.05
MEMORY_LIMIT, MANY_TOKENS = 1 / 20, 16384
SAMPLE = 256
HEADS = [("ms", 9), ("x plain", 8), ("range", 14), ("peak MiB", 9), ("loss", 9), ("hidden", 9), ("weight", 9)]
Side = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sum of the cross-entropies of hidden [N, H], weight [V, H] and labels [N]."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Loss against its peers.", allow_abbrev=False)
    cuda = torch.cuda.is_available()
    defaults: Mapping[str, list[int]] = {"tokens": [1024, 16384] if cuda else [1024, 4096]}
    parser.add_argument("--tokens", type=positive, nargs="+", default=defaults["tokens"])
    parser.add_argument("--vocabulary", type=positive, nargs="+", default=[128256, 250880] if cuda else [128256])
    parser.add_argument("--hidden", type=positive, default=2048 if cuda else 512)
    parser.add_argument("--rounds", type=positive, default=7 if cuda else 3)
    parser.add_argument("--chunk-tokens", type=positive, nargs="*", default=[1024, 4096] if cuda else [])
    parser.add_argument("--sides", nargs="*", help="beside ours and plain only these, such as torch")
    parser.add_argument("--profile", action="store_true", default=cuda, help="the ten largest operators of ours")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}, bfloat16, hidden {options.hidden}, {options.rounds} rounds")
    is_met = True
    for tokens in options.tokens:
        for vocabulary in options.vocabulary:
            case = Case.draw(tokens, vocabulary, options.hidden, device)
            is_met &= case.compare(sides(options.chunk_tokens, device, options.sides), options.rounds)
            if options.profile:
                case.profile()
    return 0 if is_met else 1


def sides(chunk_tokens: list[int], device: torch.device, names: list[str] | None) -> dict[str, Side]:
    found: dict[str, Side] = {"ours": ours, "ours, own gradient": ours_alone}
    for tokens in chunk_tokens:
        found[f"ours, chunks of {tokens:,}"] = in_chunks_of(tokens)
    found["plain"] = plain
    found["plain float32"] = plain_float32
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = torchs
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = liger
    if unknown := set(names or ()) - set(found):
        sys.exit(f"--sides {' '.join(sorted(unknown))}: not among {', '.join(found)}")
    return {name: side for name, side in found.items() if names is None or name in {"ours", "plain", *names}}


class Sum(GradientSum):
    """Float32 gradient of one microbatch, as an optimizer keeps it."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)

    def open(self) -> tuple[Tensor, bool]:
        return self.total, False

    def close(self) -> None:
        pass


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, *, is_total: bool = True) -> Tensor:
    ones = torch.ones(1, len(labels), device=hidden.device)
    arguments = hidden.unsqueeze(1), weight, labels.unsqueeze(0), ones, ParallelContext.single()
    return linear_cross_entropy(*arguments, is_total=is_total)


def ours_alone(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ours(hidden, weight, labels, is_total=False)


def in_chunks_of(tokens: int) -> Side:
    def side(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with mock.patch.object(block_sizes, "least_tokens", return_value=tokens):
            return ours(hidden, weight, labels)

    return side


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")


def plain_float32(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, labels)


@dataclass
class Case:
    hidden: Tensor
    weight: Any
    labels: Tensor

    @classmethod
    def draw(cls, tokens: int, vocabulary: int, hidden_size: int, device: torch.device) -> Case:
        """Normal hidden states and a weight of deviation 0.02: logits of deviation about 1, as early in training."""
        generator = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, generator=generator, device=device).bfloat16().requires_grad_()
        weight = torch.empty(vocabulary, hidden_size, dtype=torch.bfloat16, device=device)
        parameter: Any = torch.nn.Parameter(weight.normal_(0.0, 0.02, generator=generator))
        parameter.shard = Shard(tuple(weight.shape), dim=0, pieces=(vocabulary,))
        parameter.gradient_sum = Sum(parameter)
        labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
        return cls(hidden, parameter, labels)

    def compare(self, sides: Mapping[str, Side], rounds: int) -> bool:
        """Print a row for each side; return True if ours is within its limits."""
        (tokens, _), vocabulary = self.hidden.shape, len(self.weight)
        print(f"\n{tokens:,} tokens x {vocabulary:,}")
        heads = [f"{head:>{width}s}" for head, width in HEADS]
        print(f"{'':26s} {' '.join(heads)}")
        exact = self.exact()
        figures: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for name, side in sides.items():
            try:
                peak = peaks[name] = self.peak_bytes(side)
                errors = [self.error(got, want) for got, want in zip(self.run(side), exact, strict=True)]
            except torch.cuda.OutOfMemoryError:
                print(f"{name:26s} does not fit in memory")
                continue
            figures[name] = f"{peak / 2**20:9,.0f} " + " ".join(f"{error:9.1e}" for error in errors)
        timed = {name: functools.partial(self.seconds, sides[name]) for name in figures}
        times = alternate(timed, rounds)
        for name, values in times.items():
            ratios = quotients(values, times["plain"]) if "plain" in times else [float("nan")]
            limits = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name:26s} {statistics.median(values) * 1e3:9.2f} {statistics.median(ratios):8.3f} {limits:>14s} "
                f"{figures[name]}",
                flush=True,
            )
        if "ours" not in times:
            return False
        for peer in ("plain", "torch"):
            if peer in times:
                ratio, memory = spread(quotients(times["ours"], times[peer])), peaks["ours"] / peaks[peer]
                print(f"ours / {peer}: {ratio} times the time, {memory:.3f} times the memory", flush=True)
        if "plain" not in times:
            return True  # plain does not fit in memory, ours does
        is_small = tokens < MANY_TOKENS or peaks["ours"] <= MEMORY_LIMIT * peaks["plain"]
        return is_small and statistics.median(quotients(times["ours"], times["plain"])) <= TIME_LIMIT

    def run(self, side: Side) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and the gradients of the sampled hidden states and rows of the weight."""
        self.hidden.grad = self.weight.grad = None
        loss = side(self.hidden, self.weight, self.labels)
        loss.backward()
        assert self.hidden.grad is not None
        grad_weight = self.weight.gradient_sum.total if self.weight.grad is None else self.weight.grad
        sample = loss.detach(), self.hidden.grad[:SAMPLE].clone(), grad_weight[:SAMPLE].clone()
        self.hidden.grad = self.weight.grad = None
        return sample

    def seconds(self, side: Side) -> float:
        self._wait()
        began_s = time.perf_counter()
        side(self.hidden, self.weight, self.labels).backward()
        self._wait()
        elapsed_s = time.perf_counter() - began_s
        self.hidden.grad = self.weight.grad = None
        return elapsed_s

    def peak_bytes(self, side: Side) -> int:
        if not self.hidden.is_cuda:
            with LiveBytes([self.hidden, self.weight, self.weight.gradient_sum.total, self.labels]) as live:
                before = live.now
                side(self.hidden, self.weight, self.labels).backward()
            self.hidden.grad = self.weight.grad = None
            return live.peak - before
        side(self.hidden, self.weight, self.labels).backward()  # compiles what is compiled
        self.hidden.grad = self.weight.grad = None
        gc.collect()
        self._wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side(self.hidden, self.weight, self.labels).backward()
        self._wait()
        self.hidden.grad = self.weight.grad = None
        return torch.cuda.max_memory_allocated() - before

    @torch.no_grad()
    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `run` returns, in float64."""
        weight = self.weight.double()
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        grad_weight = torch.zeros_like(weight[:SAMPLE])
        grad_hidden = torch.empty(0)
        for begin in range(0, len(self.hidden), SAMPLE):
            hidden, labels = self.hidden[begin : begin + SAMPLE].double(), self.labels[begin : begin + SAMPLE]
            log_probs = torch.log_softmax(hidden @ weight.t(), -1)
            total -= log_probs.gather(-1, labels.unsqueeze(-1)).sum()
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(-1, labels.unsqueeze(-1), -torch.ones_like(labels, dtype=torch.float64)[:, None])
            grad_weight += grad_logits[:, :SAMPLE].t() @ hidden
            if not begin:
                grad_hidden = grad_logits @ weight
        return total, grad_hidden, grad_weight

    @staticmethod
    def error(got: Tensor, want: Tensor) -> float:
        return float((got.double() - want).abs().max() / want.abs().max())

    def profile(self) -> None:
        self.seconds(ours)
        for key, milliseconds, _, calls in largest_operators(lambda: self.seconds(ours)):
            print(f"    {milliseconds:9.3f} ms {calls:5d} x  {key[:100]}")

    def _wait(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
