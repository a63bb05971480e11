"""Output projection and cross-entropy, forward and backward: ours against the plain one, torch's and Liger's.

    python benchmarks/loss.py [--tokens 1024 16384] [--vocabulary 128256 250880] [--hidden 2048] [--rounds 7]

Runs in bfloat16 on the CUDA device there is, else on the CPU with smaller defaults. The sides run in turn:

- ours: `linear_cross_entropy` on one tensor-parallel rank; with --chunk-tokens also with other chunks of tokens
- plain: all logits in bfloat16, F.cross_entropy, autograd
- plain float32: the same with the logits converted to float32 first, as transformers and Megatron do
- torch: F.linear_cross_entropy in chunks (torch 2.13)
- liger: liger-kernel's fused linear cross-entropy, where it is installed (CUDA)

Prints for each side the median time, its ratio to plain round by round, the peak of memory above the inputs with both
gradients included (on the CPU as torch's operators return it), and the largest errors of the loss, the gradient of the
hidden states and that of the weight against float64, relative to the largest number. Error in the gradients is measured
on the first 256 tokens and 256 rows of the vocabulary.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.alternating import alternate, positive, quotients
from megatron.parallel import loss_chunks
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import linear_cross_entropy
from megatron.parallel.shards import Shard

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
    parser.add_argument("--profile", action="store_true", default=cuda, help="the ten largest operators of ours")
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}, bfloat16, hidden {options.hidden}, {options.rounds} rounds")
    for tokens in options.tokens:
        for vocabulary in options.vocabulary:
            case = Case.draw(tokens, vocabulary, options.hidden, device)
            case.compare(sides(options.chunk_tokens, device), options.rounds)
            if options.profile:
                case.profile()
    return 0


def sides(chunk_tokens: list[int], device: torch.device) -> dict[str, Side]:
    found: dict[str, Side] = {"ours": ours}
    for tokens in chunk_tokens:
        found[f"ours, chunks of {tokens:,}"] = in_chunks_of(tokens)
    found["plain"] = plain
    found["plain float32"] = plain_float32
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = torchs
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = liger
    return found


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    ones = torch.ones(1, len(labels), device=hidden.device)
    return linear_cross_entropy(hidden.unsqueeze(1), weight, labels.unsqueeze(0), ones, ParallelContext.single())


def in_chunks_of(tokens: int) -> Side:
    def side(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with mock.patch.object(loss_chunks, "least_tokens", return_value=tokens):
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
    weight: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, tokens: int, vocabulary: int, hidden_size: int, device: torch.device) -> Case:
        """Normal hidden states and a weight of deviation 0.02: logits of deviation about 1, as early in training."""
        generator = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(tokens, hidden_size, generator=generator, device=device).bfloat16().requires_grad_()
        weight = torch.empty(vocabulary, hidden_size, dtype=torch.bfloat16, device=device)
        parameter: Any = torch.nn.Parameter(weight.normal_(0.0, 0.02, generator=generator))
        parameter.shard = Shard(tuple(weight.shape), dim=0, pieces=(vocabulary,))
        labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
        return cls(hidden, parameter, labels)

    def compare(self, sides: Mapping[str, Side], rounds: int) -> None:
        (tokens, _), vocabulary = self.hidden.shape, len(self.weight)
        print(f"\n{tokens:,} tokens x {vocabulary:,}")
        heads = [f"{head:>{width}s}" for head, width in HEADS]
        print(f"{'':26s} {' '.join(heads)}")
        exact = self.exact()
        figures: dict[str, str] = {}
        for name, side in sides.items():
            try:
                peak = self.peak_bytes(side)
                errors = [self.error(got, want) for got, want in zip(self.run(side), exact, strict=True)]
            except torch.cuda.OutOfMemoryError:
                print(f"{name:26s} does not fit in memory")
                continue
            figures[name] = f"{peak / 2**20:9,.0f} " + " ".join(f"{error:9.1e}" for error in errors)
        timed = {name: functools.partial(self.seconds, sides[name]) for name in figures}
        times = alternate(timed, rounds)
        for name, values in times.items():
            ratios = quotients(values, times["plain"]) if "plain" in times else [float("nan")]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"{name:26s} {statistics.median(values) * 1e3:9.2f} {statistics.median(ratios):8.3f} {spread:>14s} "
                f"{figures[name]}",
                flush=True,
            )
        if "torch" in times:
            ratios = quotients(times["ours"], times["torch"])
            print(f"ours / torch {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")

    def run(self, side: Side) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and the gradients of the sampled hidden states and rows of the weight."""
        self.hidden.grad = self.weight.grad = None
        loss = side(self.hidden, self.weight, self.labels)
        loss.backward()
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        sample = loss.detach(), self.hidden.grad[:SAMPLE].clone(), self.weight.grad[:SAMPLE].clone()
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
            with Storages() as storages:
                side(self.hidden, self.weight, self.labels).backward()
            self.hidden.grad = self.weight.grad = None
            return storages.peak
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
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.hidden.is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.seconds(ours)
        with torch.profiler.profile(activities=activities) as profiler:
            self.seconds(ours)
        key = "self_device_time_total" if self.hidden.is_cuda else "self_cpu_time_total"
        rows = sorted(profiler.key_averages(), key=lambda row: -getattr(row, key))[:10]
        for row in rows:
            print(f"    {getattr(row, key) / 1e3:9.3f} ms {row.count:5d} x  {row.key[:100]}")

    def _wait(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


class Storages(TorchDispatchMode):
    """Bytes of the storages that operators returned and that still live; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:  # a view or an in-place result allocates nothing
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


if __name__ == "__main__":
    sys.exit(main())
