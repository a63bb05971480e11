"""Runs whose ranks compute one microbatch each and compare, with faults in one rank's products. Runs in ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.data.index.indexed import DataError
from megatron.observability.metrics import MetricsLog
from megatron.options.progress import Progress
from megatron.parallel import losses
from megatron.parallel.context import ParallelContext
from megatron.parallel.linear import RowParallelLinear
from megatron.parallel.operators.softmax import RowSums
from megatron.parallel.shards import named_parameters
from megatron.resilience.watchdog import Watchdog
from megatron.runtime.devices import device_of
from megatron.training.engine import Engine
from megatron.training.recheck import Recheck
from tests import runs

INTEGERS = {4: torch.int32, 2: torch.int16}


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit of one number flipped."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    tensor.view(-1).view(INTEGERS[tensor.element_size()])[tensor.numel() // 2] ^= 1 << bit
    return tensor


class _Forward(torch.autograd.Function):
    """An output with a flipped bit, whose gradient is right."""

    @staticmethod
    def forward(function: Any, x: Tensor, bit: int) -> Tensor:
        return flipped(x, bit)

    @staticmethod
    def backward(function: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Backward(torch.autograd.Function):
    """An output that is right, with a flipped bit in its gradient."""

    @staticmethod
    def forward(function: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(function: Any, *gradients: Tensor) -> Tensor:
        return flipped(gradients[0], 5)


@contextlib.contextmanager
def wrong_product(
    rank: int, layer: str, direction: str, passes: tuple[int, ...] | None, bit: int = 5
) -> Iterator[None]:
    """One bit of a layer's product (forward), of its input's gradient or of its weight's is wrong on one rank.

    `passes`: in which of the rank's passes with gradients, counted from 0; None: in all. `bit`: of a forward product.
    """
    original, count = RowParallelLinear.forward, itertools.count()

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        is_meant = self.ctx.rank == rank and weight.full_name == f"{layer}.weight" and torch.is_grad_enabled()
        if not is_meant or not (passes is None or next(count) in passes):
            return original(self, x)
        if direction == "weight":
            self._parameters["weight"] = _Backward.apply(weight)
        product = original(self, _Backward.apply(x) if direction == "backward" else x)
        self._parameters["weight"] = weight
        return _Forward.apply(product, bit) if direction == "forward" else product

    with patch.object(RowParallelLinear, "forward", forward):
        yield


@contextlib.contextmanager
def flipped_weight(rank: int, name: str, consumed_samples: int) -> Iterator[None]:
    """One bit of a weight flips on one rank, after the step over these samples."""
    original = Engine.train_step

    def train_step(self: Engine, microbatches: Any, **options: Any) -> Any:
        result = original(self, microbatches, **options)
        if self.ctx.rank == rank and options["consumed_samples"] == consumed_samples:
            weight = dict(named_parameters(self.module))[name]
            weight.data.copy_(flipped(weight.data, 5))
        return result

    with patch.object(Engine, "train_step", train_step):
        yield


@contextlib.contextmanager
def wrong_label_logits(rank: int) -> Iterator[None]:
    """The logits of labels are wrong on one rank in each loss over a divided vocabulary, and nothing else is."""
    original = losses.join_rows

    def join_rows(own: RowSums, columns: Tensor, ctx: ParallelContext) -> tuple[RowSums, Tensor]:
        # -inf, of a label that another rank holds, stays so
        return original(own, columns + (ctx.rank == rank), ctx)

    with patch.object(losses, "join_rows", join_rows):
        yield


@contextlib.contextmanager
def unreadable(rank: int) -> Iterator[None]:
    """One rank cannot read the microbatch of a recheck."""
    original = Recheck._read

    def read(self: Recheck, begin: int) -> Any:
        if self._engine.ctx.rank == rank:
            raise DataError("sample 5 is damaged")
        return original(self, begin)

    with patch.object(Recheck, "_read", read):
        yield


def run(arguments: str, *fault: Any) -> dict[str, Any]:
    """A run with a fault of `wrong_product`: what ended it, its rows, notes, alerts, messages, and passes of checks."""
    return _noted(arguments, wrong_product(*fault) if fault else contextlib.nullcontext())


def run_with_noise(arguments: str, noise: float, *fault: Any) -> dict[str, Any]:
    """The same on a device that states so much noise."""
    device = dataclasses.replace(device_of("cpu"), repeat_noise=noise)
    with patch("megatron.training.recheck.device_of", lambda name: device):
        return run(arguments, *fault)


def run_with_flipped_weight(arguments: str, *fault: Any) -> dict[str, Any]:
    return _noted(arguments, flipped_weight(*fault))


def run_with_wrong_label_logits(arguments: str, rank: int) -> dict[str, Any]:
    return _noted(arguments, wrong_label_logits(rank))


def run_that_cannot_read(arguments: str, rank: int) -> dict[str, Any]:
    return _noted(arguments, unreadable(rank))


def run_that_leaves_out(arguments: str, begin: int) -> dict[str, Any]:
    """As after a rollback, for which the step over the samples from `begin` is left out."""
    return _noted(arguments, patch.object(Progress, "leaves_out", lambda progress, start, end: start == begin))


def _noted(arguments: str, fault: contextlib.AbstractContextManager[Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "rows": [],
        "notes": [],
        "alerts": [],
        "messages": [],
        "checks": 0,
        "begins": [],
        "reads": False,
    }
    compute = Recheck._compute

    def counted(self: Recheck, batch: Any, begin: int) -> Any:
        told["checks"] += 1
        told["begins"].append(begin)
        told["reads"] = batch is not None
        return compute(self, batch, begin)

    with (
        patch.object(Recheck, "_compute", counted),
        patch.object(MetricsLog, "log_recheck", lambda log, row: told["rows"].append(row)),
        patch.object(MetricsLog, "message", lambda log, text: told["messages"].append(text)),
        patch.object(Watchdog, "note", lambda watchdog, remark: told["notes"].append(remark)),
        patch.object(Watchdog, "alert", lambda watchdog, event, text: told["alerts"].append(event)),
        fault,
    ):
        told["fault"] = runs.train(arguments)
    return told


def bits_of_run(arguments: str) -> dict[str, Any]:
    """Losses and norms of a run, the weights of this rank after each step, and the passes and checks that it made."""
    told: dict[str, Any] = {"losses": [], "weights": [], "passes": 0, "checks": 0}
    train_step, forward, compute = Engine.train_step, RowParallelLinear.forward, Recheck._compute
    engines: list[Engine] = []
    torch.manual_seed(0)  # the state is compared too, and the ranks have run other tests

    def noted_step(self: Engine, microbatches: Any, **options: Any) -> Any:
        # before the step: after the check, which follows the step before it
        told["weights"].append(_digest(self))
        result = train_step(self, microbatches, **options)
        told["losses"].append((float(result.loss).hex(), float(result.grad_norm).hex()))
        engines[:] = [self]
        return result

    def noted_forward(self: Any, x: Tensor) -> Tensor:
        told["passes"] += torch.is_grad_enabled()
        return forward(self, x)

    def noted_compute(self: Any, *arguments: Any) -> Any:
        told["checks"] += 1
        return compute(self, *arguments)

    with (
        patch.object(Engine, "train_step", noted_step),
        patch.object(RowParallelLinear, "forward", noted_forward),
        patch.object(Recheck, "_compute", noted_compute),
    ):
        fault = runs.train(arguments)
    assert fault == "", fault
    told["weights"].append(_digest(engines[0]))
    return told


def _digest(engine: Engine) -> str:
    """Hash of this rank's weights, of what its optimizer holds of them, and of the device's random numbers."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes())
    for _, parameter in named_parameters(engine.module):
        digest.update(parameter.detach().float().numpy().tobytes())
    for part in engine.state.owned():
        for tensor in (part.weight, *part.moments.values()):
            digest.update(tensor.detach().float().numpy().tobytes())
    return digest.hexdigest()
