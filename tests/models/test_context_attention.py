"""Attention over rows that lie on several ranks, against float64 over the whole row by torch's own kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.models.attention import block_kernels, head_exchange, ring
from megatron.models.attention.block_kernels import FlashKernel, Inputs, Results
from megatron.models.attention.exchange_choice import exchange_faults, exchange_of
from megatron.models.attention.head_exchange import HeadExchange
from megatron.models.attention.kernels import SDPAttention
from megatron.models.attention.layer import build_context_kernel
from megatron.models.attention.ring import RingAttention
from megatron.models.attention.ring_plan import Form, ScoreBlock, Visibility, plan_ring
from megatron.models.attention.scores import Scores
from megatron.models.positions import Packing, alibi_slopes
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.costs import Attention
from megatron.parallel.operators import products
from megatron.runtime.device_cpu import CPU
from megatron.runtime.device_cuda import CUDA
from megatron.runtime.device_hpu import HPU
from megatron.settings.command_line import parse_arguments
from tests.ranks import RankPools

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}


class Case(NamedTuple):
    """A row, the heads and the ranks of an attention."""

    size: int
    chunk: int
    lengths: list[list[int]] | None
    """Documents of each sample."""
    kv_heads: int
    groups: int
    scores: Scores
    dtype: torch.dtype = torch.float32
    num_samples: int = 2
    seed: int = 0

    @property
    def length(self) -> int:
        return 2 * self.size * self.chunk

    @property
    def packing(self) -> Packing | None:
        if self.lengths is None:
            return None
        starts = [[sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in self.lengths]
        positions = [[place for length in row for place in range(length)] for row in self.lengths]
        return Packing(torch.tensor(positions), torch.tensor(starts))

    def tensors(self) -> list[Tensor]:
        """q, k, v of whole rows and the gradient of the context, [B, heads, S, d], in memory by token."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.groups, self.kv_heads, self.kv_heads, self.kv_heads * self.groups
        shapes = [(self.length, self.num_samples, count, 8) for count in heads]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [part.to(self.dtype).permute(1, 2, 0, 3) for part in drawn]


def exact(case: Case) -> list[Tensor]:
    """The context and the gradients of q, k and v, in float64."""
    *parts, grad = (part.double() for part in case.tensors())
    q, k, v = inputs = [part.requires_grad_() for part in parts]
    place, packing, scores = torch.arange(case.length), case.packing, case.scores
    seen = place <= place[:, None]
    if packing is not None:
        seen = seen & (place >= packing.starts_BS[:, None, :, None])
    if scores.window is not None:
        seen = seen & (place > place[:, None] - scores.window)
    bias = torch.zeros(case.num_samples, q.shape[1], case.length, case.length, dtype=torch.float64)
    if scores.slopes is not None:
        bias += scores.slopes.double()[:, None, None] * (place - place[:, None])
    bias.masked_fill_(~seen, -math.inf)
    if scores.cap is None:
        context = F.scaled_dot_product_attention(q, k, v, bias, scale=scores.scale, enable_gqa=True)
    else:  # torch's kernel has none
        scale = scores.scale or q.shape[3] ** -0.5
        k, v = (part.repeat_interleave(case.groups, 1) for part in (k, v))
        logits = scores.cap * torch.tanh(q @ k.mT * scale / scores.cap)
        context = (logits + bias).softmax(-1) @ v
    return [context.detach(), *torch.autograd.grad(context, inputs, grad)]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks as threads


class Group:
    """Messages between threads, in place of a process group, as one of its ranks has them."""

    def __init__(self, queues: dict[tuple[int, int], SimpleQueue[Tensor]], rank: int, size: int) -> None:
        self.queues, self.rank, self.size = queues, rank, size


class Delivery(NamedTuple):
    buffer: Tensor | None
    queue: SimpleQueue[Tensor]

    def wait(self) -> Tensor | None:
        if self.buffer is not None:
            came = self.queue.get(timeout=60)
            assert came.shape == self.buffer.shape
            self.buffer.copy_(came)
        return self.buffer


def post_exchange(message: Tensor | None, to: int, buffer: Tensor | None, source: int, group: Any) -> Delivery:
    if message is not None:
        assert message.is_contiguous()
        group.queues[group.rank, to].put(message.clone())
    return Delivery(buffer, group.queues[source, group.rank])


def all_to_all_rows(x: Tensor, group: Any, ctx: ParallelContext) -> Tensor:
    for to, part in enumerate(x):
        group.queues[group.rank, to].put(part.clone())
    return torch.stack([group.queues[source, group.rank].get(timeout=60) for source in range(group.size)])


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with (
        patch.object(ring, "post_exchange", post_exchange),
        patch.object(head_exchange, "all_to_all_rows", all_to_all_rows),
        patch.object(block_kernels, "ATTENTION_QUERIES", 3),
    ):
        yield


Build = Callable[[Scores, ParallelContext], Any]


def by_ring(scores: Scores, ctx: ParallelContext) -> Any:
    return RingAttention(scores, ctx)


def by_plain_ring(scores: Scores, ctx: ParallelContext) -> Any:
    return RingAttention(scores, ctx, is_plain=True)


def by_masked_ring(scores: Scores, ctx: ParallelContext) -> Any:
    with patch.object(ring, "device_of", lambda kind: replace(CPU, compiles_shapes=True)):
        return RingAttention(scores, ctx)


def by_heads(scores: Scores, ctx: ParallelContext) -> Any:
    if scores.slopes is not None:
        scores = dataclasses.replace(scores, slopes=scores.slopes.chunk(ctx.context_size)[ctx.context_rank])
    return HeadExchange(SDPAttention(scores, by_document=True), ctx)


def own(x: Tensor, ctx: ParallelContext) -> Tensor:
    """[B, heads, S, d] -> this rank's rows, in memory by token as the projections give them."""
    rows = torch.cat([x[:, :, places.start : places.stop] for places in ctx.places(x.shape[2])], 2)
    return rows.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def on_rank(case: Case, build: Build, ctx: ParallelContext) -> list[Tensor]:
    *parts, grad = (own(part, ctx) for part in case.tensors())
    inputs = [part.requires_grad_() for part in parts]
    context = build(case.scores, ctx)(*inputs, case.packing, 0.0)
    return [context.detach(), *torch.autograd.grad(context, inputs, grad)]


def gathered(case: Case, ranks: list[list[Tensor]]) -> list[Tensor]:
    """The rows of all ranks, in order."""
    whole = []
    for parts in zip(*ranks, strict=True):
        rows = torch.empty(*parts[0].shape[:2], case.length, parts[0].shape[3], dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            first = 0
            for places in ParallelContext(context_size=case.size, rank=rank).places(case.length):
                rows[:, :, places.start : places.stop] = part[:, :, first : first + len(places)]
                first += len(places)
        whole.append(rows)
    return whole


def computed(case: Case, build: Build) -> list[Tensor]:
    """The context and the gradients of q, k and v, from ranks that are threads."""
    queues: dict[tuple[int, int], SimpleQueue[Tensor]] = {
        (source, to): SimpleQueue() for source in range(case.size) for to in range(case.size)
    }

    def run(rank: int) -> list[Tensor]:
        group: Any = Group(queues, rank, case.size)
        return on_rank(case, build, ParallelContext(context_size=case.size, rank=rank, context_group=group))

    with ThreadPoolExecutor(case.size) as pool:
        return gathered(case, list(pool.map(run, range(case.size))))


DOCUMENTS_OF_48 = [[1, 30, 1, 1, 15], [48]]


def assert_equals_float64(case: Case, found: list[Tensor], tolerance: float | None = None) -> None:
    # gradients of queries and keys are differences of products as large as this, and 0 where one key is seen
    least = 0.3 * case.tensors()[3].norm()
    for what, got, want in zip(("context", "q", "k", "v"), found, exact(case), strict=True):
        assert got.dtype == case.dtype
        error = float((got.double() - want).norm() / torch.maximum(want.norm(), least))
        assert error < (tolerance or TOLERANCES[case.dtype]), f"{what}: relative error {error:.1e}"


def documents_of(length: int) -> st.SearchStrategy[list[int]]:
    """Lengths that add up; many are 1, as padding is."""

    def cut(borders: set[int]) -> list[int]:
        places = [0, *sorted(borders), length]
        return [end - begin for begin, end in pairwise(places)]

    return st.sets(st.integers(1, length - 1), max_size=length - 1).map(cut)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, chunk = draw(st.sampled_from((2, 3, 4))), draw(st.integers(1, 6))
    length, num_samples = 2 * size * chunk, draw(st.integers(1, 2))
    kv_heads, groups = draw(st.sampled_from((1, 2, 3, 4, 6))), draw(st.sampled_from((1, 2, 4)))
    packed = draw(st.booleans())
    return Case(
        size,
        chunk,
        [draw(documents_of(length)) for _ in range(num_samples)] if packed else None,
        kv_heads,
        groups,
        Scores(
            alibi_slopes(kv_heads * groups) if draw(st.booleans()) else None,
            draw(st.none() | st.integers(1, length)),
            draw(st.sampled_from((None, 0.7))),
            draw(st.sampled_from((None, 1.5))),
        ),
        draw(st.sampled_from((torch.float32, torch.float64))),
        num_samples,
        draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("build", [by_ring, by_plain_ring, by_masked_ring, by_heads])
@given(case=cases())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_attention_over_ranks_equals_float64_over_the_row(build: Build, case: Case) -> None:
    if build is by_heads and case.kv_heads * case.groups % case.size:
        case = case._replace(groups=case.size)
        slopes = None if case.scores.slopes is None else alibi_slopes(case.kv_heads * case.groups)
        case = case._replace(scores=dataclasses.replace(case.scores, slopes=slopes))
    assert_equals_float64(case, computed(case, build))


@pytest.mark.parametrize("widened", [frozenset(), frozenset({torch.bfloat16})], ids=["", "widened"])
@pytest.mark.parametrize("build", [by_ring, by_plain_ring, by_heads])
def test_16_bit_blocks_are_summed_in_float32(build: Build, widened: frozenset[torch.dtype]) -> None:
    """Over four ranks as exact as one rounding, also on a processor without 16-bit products."""
    case = Case(4, 6, DOCUMENTS_OF_48, 2, 2, Scores(), torch.bfloat16)
    with patch.object(products, "WIDENED", widened):
        assert_equals_float64(case, computed(case, build), 5e-3)


@pytest.mark.parametrize("build", [by_ring, by_heads])
def test_a_second_derivative_is_refused(build: Build) -> None:
    case = Case(2, 2, None, 2, 1, Scores())

    def twice(scores: Scores, ctx: ParallelContext) -> Any:
        def attend(q: Tensor, *arguments: Any) -> Tensor:
            context: Tensor = build(scores, ctx)(q, *arguments)
            (grad,) = torch.autograd.grad(context.square().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()
            return build(scores, ctx)(q, *arguments)

        return attend

    assert_equals_float64(case, computed(case, twice))


@pytest.mark.parametrize("form", [Form.FULL, Form.CAUSAL])
def test_the_flash_kernel_takes_what_a_block_has(form: Form) -> None:
    """On tensors without data: operator, order of arguments and shapes."""
    kernel = FlashKernel(Scores(scale=0.5))
    q = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 16, 8, dtype=torch.bfloat16, device="meta")
    inputs, rows = Inputs(q, k, k), slice(0, 16)
    block = ScoreBlock(slice(None), rows, rows, 0, 0, form)
    context, log_sums = kernel.forward(inputs, block)
    assert (context.shape, log_sums.shape) == (q.shape, q.shape[:3])
    results = Results(context, context, log_sums, log_sums)
    assert [x.shape for x in kernel.backward(inputs, results, block)] == [q.shape, k.shape, k.shape]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks over gloo

KINDS = {
    "llama": ("", False),
    "alibi": ("--position-embedding-type alibi", False),
    "window": ("--attention-window 19", False),
    "packed": ("", True),
    "all": ("--position-embedding-type alibi --attention-window 19 --attention-softcap 2", True),
}
DOCUMENTS = [[1, 30, 1, 1, 15, 16], [64]]


def config_of(flags: str) -> Config:
    return parse_arguments(
        "--architecture llama --hidden-size 64 --num-attention-heads 8 --seq-length 64 --attention-dropout 0 "
        f"--device cpu {flags}".split()
    )[0]


def case_of(config: Config, ctx: ParallelContext, *, packed: bool, dtype: torch.dtype) -> Case:
    """The case whose heads are those of this tensor-parallel rank."""
    model, tensor_size = config.model, ctx.tensor_size
    heads, kv_heads = model.num_attention_heads // tensor_size, max(1, model.num_kv_heads // tensor_size)
    slopes = None
    if model.position_embedding_type == "alibi":
        slopes = alibi_slopes(model.num_attention_heads).chunk(tensor_size)[ctx.tensor_rank]
    scores = Scores(slopes, model.attention_window, None, model.attention_softcap)
    chunk = 64 // (2 * ctx.context_size)
    lengths = DOCUMENTS if packed else None
    return Case(ctx.context_size, chunk, lengths, kv_heads, heads // kv_heads, scores, dtype)


def rank_attends(flags: str, packed: bool, dtype: torch.dtype) -> tuple[ParallelContext, Case, list[list[Tensor]]]:
    """Twice on this rank of a world: its layout, and results."""
    config = config_of(flags)
    ctx = ParallelContext.build(config.parallel, "cpu")
    case = case_of(config, ctx, packed=packed, dtype=dtype)

    def build(scores: Scores, ctx: ParallelContext) -> Any:
        return build_context_kernel(config, ctx, packed=packed, window=scores.window)

    results = [on_rank(case, build, ctx) for _ in range(2)]
    return ParallelContext(**{name: getattr(ctx, name) for name in LAYOUT}), case, results


LAYOUT = ("tensor_size", "context_size", "num_batch_ranks", "num_stages", "rank")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
@pytest.mark.parametrize(
    ("size", "heads", "dtype"),
    [
        (2, "--num-query-groups 2", torch.float32),
        (4, "--num-query-groups 2", torch.float32),
        (4, "--tensor-model-parallel-size 2 --num-query-groups 2", torch.bfloat16),
    ],
    ids=["2", "4", "2 x 2"],
)
def test_ranks_attend_as_one_process_bit_for_bit_run_after_run(
    ranks: RankPools, kind: str, exchange: str, size: int, heads: str, dtype: torch.dtype
) -> None:
    flags, packed = KINDS[kind]
    tensor_size = 2 if "tensor" in heads else 1
    flags += f" {heads} --context-parallel-size {size // tensor_size} --context-parallel-exchange {exchange}"
    found = ranks(size)(rank_attends, flags, packed, dtype)
    for tensor_rank in range(tensor_size):
        mine = [result for result in found if result[0].tensor_rank == tensor_rank]
        for _, _, (first, second) in mine:
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        case = mine[0][1]
        assert_equals_float64(case, gathered(case, [results[0] for _, _, results in mine]))


def rank_drops(flags: str) -> Tensor:
    """The context of values 1 under dropout: for each head and query, the sum of its probabilities that are kept."""
    config = config_of(flags)
    ctx = ParallelContext.build(config.parallel, "cpu")
    torch.manual_seed(ctx.rank)
    q = torch.randn(4, 8, 32, 8)
    kernel = build_context_kernel(config, ctx, packed=False)
    context = kernel(q, q, torch.ones_like(q).requires_grad_(), None, 0.5)
    context.sum().backward()
    return context.detach()[..., 0]


def test_heads_are_exchanged_under_dropout(ranks: RankPools) -> None:
    first, second = ranks(2)(rank_drops, "--context-parallel-size 2 --attention-dropout 0.5")
    kept = torch.cat([first, second], 2)
    assert kept.mean().item() == pytest.approx(1.0, abs=0.02)
    assert kept.std() > 0.1
    # each rank drops for itself
    assert not torch.equal(kept[:, :4] == 0, kept[:, 4:] == 0)


# ---------------------------------------------------------------------------------------------------------------------
# What a ring keeps and sends


def test_a_ring_keeps_its_own_rows_alone() -> None:
    case = Case(4, 4, None, 2, 2, Scores())
    saved: list[int] = []

    def build(scores: Scores, ctx: ParallelContext) -> Any:
        def attend(*arguments: Any) -> Tensor:
            def keep(x: Tensor) -> Tensor:
                saved.append(x.numel())
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                context: Tensor = RingAttention(scores, ctx)(*arguments)
            return context

        return attend

    computed(case, build)
    q, k, v, _ = (part.numel() for part in case.tensors())
    assert sum(saved) == 2 * q + k + v + q // 8


@given(
    size=st.integers(2, 6), chunk=st.integers(1, 5), window=st.none() | st.integers(1, 70), kv_heads=st.integers(1, 3)
)
@settings(max_examples=100, deadline=None)
def test_the_cost_of_a_ring_is_what_its_ranks_send(size: int, chunk: int, window: int | None, kv_heads: int) -> None:
    length = 2 * size * chunk
    places = [ParallelContext(context_size=size, rank=rank).places(length) for rank in range(size)]
    plans = [plan_ring(rank, places, Visibility(window)) for rank in range(size)]
    rows = sum(part.stop - part.start for plan in plans for step in plan.steps for part in step.sent)
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            (theirs,) = (other for other in plans[step.source].steps if other.destination == rank)
            assert step.num_received == sum(part.stop - part.start for part in theirs.sent)
    # keys and values forward, the same and their gradients backward
    numbers = 3 * 2 * kv_heads * 8 * rows / length
    attention = Attention(2 * kv_heads, kv_heads, 8, window)
    assert attention.ring_exchanged(1, size, length) == pytest.approx(numbers)


def test_under_a_window_no_more_than_its_rows_are_sent() -> None:
    places = [ParallelContext(context_size=4, rank=rank).places(800) for rank in range(4)]
    plan = plan_ring(1, places, Visibility(window=11))
    assert [step.sent for step in plan.steps] == [(slice(90, 100),), (), (slice(190, 200),)]


def test_documents_within_chunks_send_nothing() -> None:
    places = [ParallelContext(context_size=2, rank=rank).places(16) for rank in range(2)]
    for rank in range(2):
        plan = plan_ring(rank, places, Visibility(begins=((0, 4, 8, 10, 12),)))
        assert [(step.sent, step.blocks) for step in plan.steps] == [((), ())]


# ---------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize(
    ("device", "flags", "exchange"),
    [
        (CPU, "--num-query-groups 2", "ring"),
        (CPU, "--num-query-groups 8", "all-to-all"),  # as many keys and values as queries
        (CPU, "--num-query-groups 8 --attention-window 8", "ring"),  # few of them travel
        (CPU, "--num-query-groups 2 --attention-dropout 0.1", "all-to-all"),
        (CPU, "--num-query-groups 2 --context-parallel-size 3", "ring"),
        (CPU, "--num-query-groups 2 --context-parallel-size 8", "all-to-all"),
        (CUDA, "--num-query-groups 2", "ring"),
        (CUDA, "--num-query-groups 2 --attention-window 8", "all-to-all"),
        (HPU, "--num-query-groups 2", "all-to-all"),
        (HPU, "--num-query-groups 2 --context-parallel-size 3", "ring"),
        (HPU, "--num-query-groups 2 --context-parallel-exchange ring", "ring"),
    ],
)
def test_exchange_is_chosen_by_device_and_shape(device: Any, flags: str, exchange: str) -> None:
    config = config_of(f"--context-parallel-size 2 {flags}")
    assert exchange_of(config, device, config.model.attention_window) == exchange
    assert list(exchange_faults(config)) == []


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--context-parallel-size 3 --context-parallel-exchange all-to-all",
            "context_parallel_exchange=all-to-all gives each context rank a share of the heads, but "
            "context_parallel_size=3 does not divide the 8 of a tensor-parallel rank; use 1, 2, 4 or 8, or "
            "context_parallel_exchange=ring",
        ),
        (
            "--context-parallel-size 2 --context-parallel-exchange ring --attention-dropout 0.1",
            "attention_dropout=0.1 does not go with the exchange of keys and values in a ring, where no rank has all "
            "probabilities of a query; set it to 0, or use context_parallel_exchange=all-to-all",
        ),
        (
            "--context-parallel-size 3 --attention-dropout 0.1",
            "attention_dropout=0.1 does not go with the exchange of keys and values in a ring, where no rank has all "
            "probabilities of a query; set it to 0, or use context_parallel_exchange=all-to-all with "
            "context_parallel_size 1, 2, 4 or 8",
        ),
        (
            "--context-parallel-size 2 --context-parallel-exchange ring --attention-backend flex",
            "attention_backend=flex returns no log-sum-exp, by which a ring joins its blocks; leave it at auto, or use "
            "context_parallel_exchange=all-to-all",
        ),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(flags: str, fault: str) -> None:
    assert list(exchange_faults(config_of(flags))) == [fault]
