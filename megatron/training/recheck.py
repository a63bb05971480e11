"""Detection of devices that compute wrongly in silence: all data-parallel ranks compute one microbatch, and compare.

Every `recheck_interval` steps each rank computes the first microbatch of the step once more, forward and backward, in a
pass of its own between two steps. Its gradients are thrown away, so the training is bit for bit what it is without.
Each rank keeps a checksum of what it hands to other ranks, of the loss and of each gradient. Where these differ between
replicas the pass is repeated twice, and the verdict (resilience/recheck.py) names the rank. The first check of a run
repeats it on all ranks, and is the last one if any does not repeat its own result.

The pass uses torch's deterministic algorithms. What a training step computes otherwise, such as by other kernels, in
the optimizer and in sums over replicas, is not checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.data.batches import BatchPlan
from megatron.observability.metrics import MetricsLog
from megatron.options.progress import Progress
from megatron.parallel.finite_checks import (
    BACKWARD,
    COMPUTED,
    FORWARD,
    GRADIENT,
    RECEIVED,
    SENT,
    FiniteChecks,
    PassPlace,
)
from megatron.parallel.messages import Sends, receive
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.shards import named_parameters
from megatron.plan.flops import declared_layers
from megatron.resilience.errors import TrainingAborted, raise_on_all_ranks
from megatron.resilience.rank_record import RankPlace
from megatron.resilience.recheck import (
    SAMPLES,
    SHOWN,
    WEIGHTS,
    Number,
    Recomputed,
    Traced,
    WrongRanks,
    agree,
    find_wrong,
)
from megatron.resilience.replica_check import checksum
from megatron.resilience.watchdog import Watchdog
from megatron.runtime import accelerator
from megatron.runtime.alerts import WRONG
from megatron.runtime.commands import first_of
from megatron.runtime.devices import device_of
from megatron.tasks.data import Microbatch
from megatron.tasks.task import Task
from megatron.training.deepspeed.pipeline_executor import Headers, tensors_of
from megatron.training.engine import Engine, pinned, to_device
from megatron.training.losses import StepLosses

FURTHER_PASSES = 2
"""Passes after one in which the replicas differ."""


class PassTrace(FiniteChecks):
    """Numbers of all that a rank computes for others in one pass, in place of the checks that these are finite.

    They are checksums of bits; `noise` above 0: norms, on a device that does not repeat bits.
    """

    def __init__(self, noise: float) -> None:
        super().__init__()
        self._noise, self._is_on = noise, True
        self._numbers: list[Tensor] = []
        self.traced: list[Traced] = []

    def partial(self, x: Tensor) -> None:
        self._add(x, COMPUTED, self.place)

    def gathered(self, x: Tensor) -> None:
        self._add(x, COMPUTED, self.place)

    def number(self, x: Tensor, kind: str, place: PassPlace | None = None) -> None:
        self._add(x, kind, place or self.place)

    def numbers(self) -> tuple[Number, ...]:
        """Return a number for each of `traced`. Waits for the device."""
        return tuple(number.item() for number in self._numbers)

    def gradient(self, name: str, gradient: Tensor) -> None:
        self._add(gradient, GRADIENT, self.place, name)

    def before_pass(self, tensors: Iterator[Tensor], kind: str) -> None:
        """Trace tensors as one number."""
        numbers = [self._number_of(each) for each in tensors]
        # a stage may have no layers
        if numbers:
            # their order counts: two tensors that were exchanged must not pass
            self._add(torch.stack(numbers), kind, self.place)

    def _add(self, x: Tensor, kind: str, place: PassPlace, name: str = "") -> None:
        self._numbers.append(self._number_of(x))
        self.traced.append(Traced(kind, place, name))

    def _number_of(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        if self._noise == 0:
            return checksum(x)
        return x.float().norm()


class _TracedSum(GradientSum):
    """The sum to which a layer adds its weight's gradient itself: traced with each gradient, and thrown away."""

    def __init__(self, name: str, shape: torch.Size, device: torch.device, trace: PassTrace) -> None:
        self._name, self._shape, self._device, self._trace = name, shape, device, trace
        self._total: Tensor | None = None
        self._open = 0

    def open(self) -> tuple[Tensor, bool]:
        has_gradient = self._total is not None
        if self._total is None:
            self._total = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        self._open += 1
        return self._total, has_gradient

    def close(self) -> None:
        assert self._total is not None
        self._open -= 1
        if self._open == 0:
            self._trace.gradient(self._name, self._total)
            self._total = None


@contextlib.contextmanager
def _own_gradients(module: nn.Module, trace: PassTrace) -> Iterator[None]:
    """Within it the module computes with aliases of its trained parameters, whose gradients go to the trace alone.

    The engine's hooks are those of the parameters: no gradient reaches its sums. One gradient is held at a time.
    """
    aliases: dict[int, nn.Parameter] = {}
    for name, parameter in named_parameters(module):
        if parameter.requires_grad:
            aliases[id(parameter)] = _alias(name, parameter, trace)
    places = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in aliases
    ]
    try:
        for part, name, parameter in places:
            setattr(part, name, aliases[id(parameter)])
        yield
    finally:
        for part, name, parameter in places:
            setattr(part, name, parameter)


def _alias(name: str, parameter: nn.Parameter, trace: PassTrace) -> nn.Parameter:
    def take(alias: Tensor) -> None:
        # none where the layer has added it to the sum itself
        if alias.grad is not None:
            trace.gradient(name, alias.grad)
        alias.grad = None

    alias: Any = nn.Parameter(parameter.detach())
    vars(alias).update(vars(parameter))
    if hasattr(parameter, "gradient_sum"):
        alias.gradient_sum = _TracedSum(name, parameter.shape, parameter.device, trace)
    alias.register_post_accumulate_grad_hook(take)
    return alias  # type: ignore[no-any-return]


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Within it use torch's deterministic algorithms where there are some."""
    before = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if before == 0:
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


class Recheck:
    """The check of one run. Every rank has one, and calls it in the same order."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        dataset: Any,
        plan: BatchPlan[Any],
        log: MetricsLog,
        watchdog: Watchdog,
    ) -> None:
        """`dataset`: of the training; `plan`: the first data-parallel rank's share of it."""
        self._engine, self._task, self._dataset, self._plan = engine, task, dataset, plan
        self._log, self._watchdog, self._config = log, watchdog, engine.config
        self._losses = StepLosses(task.objective, engine.ctx, declared_layers(engine.config))
        self._noise = device_of(engine.ctx.device.type).repeat_noise
        self._headers = Headers(engine.ctx)
        self._is_on, self._is_first, self._is_due = True, True, False

    def run_if_due(self, progress: Progress, begin: int) -> None:
        """Compare what the ranks compute of the step whose samples began at `begin`. Collective.

        Raises TrainingAborted on every rank if they differ and the run is to end then.
        """
        self._is_due |= progress.iteration % self._config.guard.recheck_interval == 0
        # what a rollback leaves out may not even be readable: the next step that trains is taken instead
        has_trained = not progress.leaves_out(begin, progress.consumed_samples)
        if self._is_on and self._is_due and has_trained:
            self._is_due = False
            self._run(progress.iteration, begin)

    def _run(self, iteration: int, begin: int) -> None:
        self._watchdog.phase("recheck", iteration)
        ctx = self._engine.ctx
        batch = raise_on_all_ranks(ctx, lambda: self._read(begin))
        trace, numbers = self._compute(batch, begin)
        if self._is_first:
            _, again = self._compute(batch, begin)
            repeats = ctx.gather_objects(agree(numbers, again, self._noise))
            if not all(repeats):
                self._switch_off(iteration, [f"rank {rank}" for rank in range(ctx.world_size) if not repeats[rank]])
                return
            self._is_first = False
        place = RankPlace.of(ctx)
        # 8 bytes a rank, but where norms are compared: each may differ by a little
        summary = numbers if self._noise else (_digest(numbers),)
        everyones = ctx.gather_objects((place.stage, place.tensor_rank, summary))
        first: dict[tuple[int, int], tuple[Number, ...]] = {}
        for stage, tensor_rank, theirs in everyones:
            first.setdefault((stage, tensor_rank), theirs)
        if all(agree(theirs, first[stage, rank], self._noise) for stage, rank, theirs in everyones):
            return
        further = tuple(self._compute(batch, begin)[1] for _ in range(FURTHER_PASSES))
        ranks = ctx.gather_objects(Recomputed(place, tuple(trace.traced), numbers, further))
        self._judge(find_wrong(ranks, ctx.num_stages, self._noise), iteration)

    def _switch_off(self, iteration: int, unsteady: list[str]) -> None:
        self._is_on = False
        self._log.message(
            f"WARNING: recheck after iteration {iteration}: {first_of(unsteady, SHOWN)} did not get the same "
            "results again, so that none can be called wrong; the run goes on without the check. If these are few, "
            "examine their devices; else give the device's record its repeat_noise, or leave out recheck_interval"
        )

    def _judge(self, wrong: WrongRanks | None, iteration: int) -> None:
        where = f"recheck after iteration {iteration}"
        if wrong is None:
            self._switch_off(iteration, ["most ranks"])
            return
        if self._engine.ctx.rank in wrong.ranks:
            self._watchdog.note(f"in the recheck after step {iteration} its results differed")
        text = f"{where}: ranks do not compute the same of one microbatch: {wrong.text}"
        if not wrong.is_certain:
            text += f"; {wrong.doubt}"
        self._log.log_recheck(
            {"iteration": iteration, "ranks": list(wrong.ranks), "is_certain": wrong.is_certain, "reason": wrong.text}
        )
        self._watchdog.alert(WRONG, text)
        if self._config.guard.recheck_action == "abort":
            raise TrainingAborted(
                f"{text}. Steps since the last recheck may have been computed wrongly too; resume from a checkpoint "
                "from before them, without that host"
            )
        self._log.message(f"WARNING: {text}. The run goes on (recheck_action=log)")

    def _read(self, begin: int) -> Microbatch | None:
        """Return the microbatch that all ranks compute, as the first data-parallel rank's step had it.

        None on inner stages, which read nothing.
        """
        if not self._engine.reads_data:
            return None
        _, keys = self._plan(begin)
        # every host has the same files, so nothing is sent
        return pinned(self._task.read(self._dataset, keys[0]), self._engine.ctx.device)

    def _compute(self, batch: Microbatch | None, begin: int) -> tuple[PassTrace, tuple[Number, ...]]:
        """Run the pass, and return its trace and numbers. Collective in each replica; nothing else changes."""
        trace, state = PassTrace(self._noise), self._engine.ctx.state
        if batch is not None:
            trace.before_pass(iter([*tensors_of(batch.inputs), *tensors_of(batch.targets)]), SAMPLES)
        trace.before_pass((parameter.data for _, parameter in named_parameters(self._engine.module)), WEIGHTS)
        state.is_recheck = True
        try:
            with _deterministic():
                self._run_pass(batch, begin, trace)
        finally:
            state.is_recheck = False
        accelerator.current().mark_step()
        return trace, trace.numbers()

    def _run_pass(self, batch: Microbatch | None, begin: int, trace: PassTrace) -> None:
        engine, ctx = self._engine, self._engine.ctx
        # as before a step: the forward passes of a reference model
        batches = [] if batch is None else [batch]
        forward = functools.partial(engine.forward, num_microbatches=1)
        completed = self._task.objective.before_step(batches, forward, ctx)
        self._begin(batch)
        # all replicas draw what the first one draws
        first = dataclasses.replace(ctx, rank=ctx.rank_at(batch_rank=0))
        checks = ctx.state.checks
        ctx.state.checks = trace
        try:
            with (
                ctx.state.streams.apart(engine.dropout_seed, begin, first),
                _own_gradients(engine.module, trace),
                self._losses.layer_terms(engine.loss_scale),
                torch.enable_grad(),
            ):
                self._run_stage(completed[0] if completed else None, trace)
        finally:
            ctx.state.checks = checks

    def _begin(self, batch: Microbatch | None) -> None:
        """Set by what the losses are divided: inner stages get the tokens from the first. Collective in a replica."""
        scale, num_tokens = 1.0, 0.0
        if batch is not None:
            num_tokens = float(batch.num_tokens)
            if batch.normaliser > 0:
                scale = 1.0 / batch.normaliser
        self._losses.begin_step(scale, max(1.0, self._engine.ctx.from_first_stage(num_tokens)))

    def _run_stage(self, batch: Microbatch | None, trace: PassTrace) -> None:
        """Run forward and backward of this rank's stage, and exchange with its neighbours. Collective in a replica.

        `batch`: None on inner stages.
        """
        ctx, sends = self._engine.ctx, Sends()
        trace.place = PassPlace(FORWARD, 0)
        if ctx.is_first_stage:
            assert batch is not None
            inputs = to_device(batch.inputs, ctx.device)
        else:
            inputs = self._receive_stream(ctx.rank_at(stage=ctx.stage - 1))
            tensors_of(inputs)[0].requires_grad_()
            trace.whole(tensors_of(inputs)[0], RECEIVED)
        if ctx.is_last_stage:
            assert batch is not None
            output = self._loss(inputs, to_device(batch.targets, ctx.device)) * self._engine.loss_scale
            gradient = None
            trace.place = PassPlace(BACKWARD, 0)
        else:
            output = self._send_stream(self._engine.module(inputs), sends, trace)
            gradient = receive(torch.empty_like(output), ctx.rank_at(stage=ctx.stage + 1))
            trace.place = PassPlace(BACKWARD, 0)
            trace.whole(gradient, RECEIVED)
        if output.requires_grad:  # not if this stage and all before it are frozen
            output.backward(gradient)
        if not ctx.is_first_stage:
            hidden = tensors_of(inputs)[0]
            assert hidden.grad is not None
            trace.whole(hidden.grad, SENT)
            sends.send(hidden.grad.contiguous(), ctx.rank_at(stage=ctx.stage - 1))
        sends.end()

    def _send_stream(self, stream: Any, sends: Sends, trace: PassTrace) -> Tensor:
        """Send the next stage what it computes with, and return the hidden state."""
        rank, hidden = self._engine.ctx.rank_at(stage=self._engine.ctx.stage + 1), tensors_of(stream)[0]
        trace.whole(hidden, SENT)
        self._headers.send(stream, rank)
        for tensor in tensors_of(stream):
            sends.send(tensor.detach().contiguous(), rank)
        return hidden

    def _receive_stream(self, rank: int) -> Any:
        """Return what the previous stage sends: the hidden state, alone or with what belongs to it."""
        is_tuple, shapes = self._headers.receive(rank)
        device = self._engine.ctx.device
        tensors = tuple(receive(torch.empty(shape, dtype=dtype, device=device), rank) for dtype, shape in shapes)
        return tensors if is_tuple else tensors[0]

    def _loss(self, inputs: Any, targets: Any) -> Tensor:
        if self._engine.config.uses_pipeline:
            return self._losses(self._engine.module(inputs), targets)
        loss: Tensor = self._engine.module(inputs, functools.partial(self._losses.compute, targets=targets))
        self._losses.keep(loss)
        return loss


def _digest(numbers: tuple[Number, ...]) -> int:
    """Return a hash of checksums, 63 bits."""
    content = np.array(numbers, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
