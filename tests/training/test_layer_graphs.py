"""Layers replayed as graphs in training, with a stand-in for the graphs that replays recorded operators on a CPU."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.models.sequential import build_layers
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import weight_gradient
from megatron.parallel.operators.weight_gradient import GradientSum
from megatron.parallel.shards import initialise, named_parameters
from megatron.runtime import devices
from megatron.runtime.device_cpu import CPU
from megatron.settings.command_line import parse_arguments
from megatron.settings.validation import check
from megatron.training.deepspeed import layer_graphs
from megatron.training.deepspeed.layer_graphs import LayerGraphs
from tests.generation.test_graphs import Accelerator
from tests.habana import stand_in_packages
from tests.models.outputs import config_of
from tests.ranks import RankPools
from tests.training import layouts

SIZES = "--num-layers 3 --hidden-size 32 --seq-length 16 --vocab-size 64 --lr-warmup-samples 0 --num-attention-heads 4"
LLAMA = f"--config tiny_llama {SIZES} --num-query-groups 2 --ffn-hidden-size 64"
QWEN2 = f"--config tiny_llama --architecture qwen2 {SIZES} --num-query-groups 2 --ffn-hidden-size 64"
BLOOM = f"--config tiny_bloom {SIZES} --hidden-dropout 0 --attention-dropout 0"
LORA = f"{LLAMA} --lora-rank 2 --lora-target-modules all-linear"
FROZEN = f"{LLAMA} --freeze layers.0.* layers.1.*"
FP8 = f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate"
ROWS, BATCH, H = 16, 2, 32


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with stand_in_packages(monkeypatch):
        found = Accelerator()
        monkeypatch.setattr(layer_graphs, "get_accelerator", lambda: found)
        yield found


class Sum(GradientSum):
    """A float32 sum of a step, as the buffers of reduction.py have one."""

    def __init__(self, weight: Tensor) -> None:
        self.memory = torch.full(weight.shape, torch.nan, device=weight.device)
        self.has_gradient = False
        self.num_opened = self.num_closed = 0

    def open(self) -> tuple[Tensor, bool]:
        has_gradient, self.has_gradient = self.has_gradient, True
        self.num_opened += 1
        return self.memory, has_gradient

    def close(self) -> None:
        self.num_closed += 1

    def end_step(self) -> None:
        self.has_gradient = False
        self.num_opened = self.num_closed = 0


class Run:
    """Layers, their graphs, and the steps of both."""

    def __init__(self, arguments: str, device: str = "cpu") -> None:
        self.ctx = dataclasses.replace(ParallelContext.single(), device=torch.device(device))
        config = config_of(arguments)
        self.ctx.state.fp8.is_on = config.fp8.uses_fp8
        self.dtype = torch.bfloat16 if config.training.bf16 else torch.float32
        specs = build_layers(config, self.ctx)
        self.layers = [spec.build().to(device, self.dtype) for spec in specs if spec.layer.number is not None]
        self.parameters = [p for layer in self.layers for p in layer.parameters()]
        initialise([pair for layer in self.layers for pair in named_parameters(layer)], 3, self.ctx)
        self.graphs = LayerGraphs(self.layers, self.ctx)
        self.plain = nn.Sequential(*self.layers)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the second step or a later one: before it there are no graphs."""
        self.ctx.state.fp8.step = max(2, self.ctx.state.fp8.step + 1)

    def hidden(self, seed: int) -> Tensor:
        drawn = torch.randn(ROWS, BATCH, H, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.ctx.device, self.dtype).requires_grad_()

    def passes(self, function: Callable[[Tensor], Tensor], seeds: list[int]) -> list[Tensor | None]:
        """Outputs and gradients by the inputs of microbatches, all forward passes first; those by the parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        inputs = [self.hidden(seed) for seed in seeds]
        outputs = [function(given) for given in inputs]
        for output in outputs:
            output.backward(2 * output.detach() + 1)
        found = [output.detach().clone() for output in outputs]
        return [*found, *(given.grad for given in inputs), *(p.grad for p in self.parameters)]

    def compare(self, seeds: list[int]) -> None:
        expected = self.passes(self.plain, seeds)
        for found, right in zip(self.passes(self.graphs, seeds), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=0)

    def update(self) -> None:
        """Change the weights in place, as an optimizer does, and begin the next step."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(1.25).add_(0.01)
        self.begin_step()


@pytest.mark.parametrize("arguments", [LLAMA, QWEN2, BLOOM, LORA, FROZEN, FP8])
def test_replayed_passes_are_those_of_the_layers(accelerator: Accelerator, arguments: str) -> None:
    run = Run(arguments)
    for seed in range(3):
        run.compare([seed])
        run.compare([seed + 10])  # another microbatch of the step
        run.update()
    assert run.graphs.num_slots == 1


def test_each_microbatch_on_its_way_has_graphs_of_its_own(accelerator: Accelerator) -> None:
    run = Run(FP8)
    for seeds in ([0, 1], [2, 3, 4], [5], [6, 7, 8]):
        run.compare(seeds)
        run.update()
    assert run.graphs.num_slots == 3


def test_the_first_step_and_passes_without_gradients_run_as_they_are(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    run.ctx.state.fp8.step = 1
    run.compare([0])
    run.begin_step()
    with torch.no_grad():
        assert torch.equal(run.graphs(run.hidden(0)), run.plain(run.hidden(0)))
    run.ctx.state.is_recheck = True
    run.compare([0])
    assert not accelerator.graphs
    run.ctx.state.is_recheck = False
    run.compare([0])
    assert accelerator.graphs


def test_frozen_layers_take_no_slot(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    for parameter in run.parameters:
        parameter.requires_grad_(False)
    for _ in range(2):
        output = run.graphs(run.hidden(0).detach())
        assert not output.requires_grad
    assert not accelerator.graphs


def test_graphs_follow_weights_to_another_place(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    run.compare([0])
    for parameter in run.parameters:
        parameter.data = parameter.data * 2
    run.compare([0])
    assert run.graphs.num_slots == 2


def test_a_graph_holds_what_it_reads(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    run.compare([0])
    # the table of angles grows with a longer text, as a generation within the training may have
    rotary = run.layers[0].attention.rotary
    rotary.angles(4 * ROWS, torch.device("cpu"), None, run.ctx)
    run.compare([1])  # the stand-in refuses memory that was freed


class Reads(nn.Module):
    """A layer that reads a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight * hidden.detach().sum().item()


def test_a_layer_that_waits_for_the_device_is_refused(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    graphs = LayerGraphs([*run.layers, Reads()], run.ctx)
    with pytest.raises(ConfigError, match=r"cuda_graph_impl=local cannot capture a layer: item .*; leave it out"):
        graphs(run.hidden(0))


def test_rows_of_another_length_are_refused(accelerator: Accelerator) -> None:
    run = Run(LLAMA)
    run.compare([0])
    with pytest.raises(ValueError, match=r"captured layers for \(16, 2, 32\), not \(1, 2, 32\)"):
        run.graphs(run.hidden(0)[:1])


@pytest.mark.parametrize("arguments", [f"{LLAMA} --bf16", FP8])
def test_sums_are_counted_and_begin_with_each_step(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """Where layers add their weights' gradients themselves, as on CUDA."""

    def add_product(into: GradientSum, grad: Tensor, inputs: Tensor) -> None:
        total, has_gradient = into.open()
        if not has_gradient:
            total.zero_()
        total.add_(grad.float().t() @ inputs.float())
        into.close()

    monkeypatch.setattr(weight_gradient, "adds_products_in_float32", lambda device: True)
    monkeypatch.setattr("megatron.parallel.linear.add_product", add_product)
    compare_sums(Run(arguments))


def compare_sums(run: Run) -> None:
    """Compare three steps of three microbatches, two of which are on their way at a time."""
    matrices: list[Any] = [p for p in run.parameters if p.dim() == 2]
    for matrix in matrices:
        matrix.gradient_sum = Sum(matrix)
    for step in range(3):
        sums = []
        for function in (run.plain, run.graphs):
            run.passes(function, [3 * step])
            run.passes(function, [3 * step + 1, 3 * step + 2])
            assert all(p.grad is None for p in matrices)
            assert {(p.gradient_sum.num_opened, p.gradient_sum.num_closed) for p in matrices} == {(3, 3)}
            sums.append([p.gradient_sum.memory.clone() for p in matrices])
            for matrix in matrices:
                matrix.gradient_sum.end_step()
        for plain, replayed in zip(*sums, strict=True):
            torch.testing.assert_close(replayed, plain, rtol=0, atol=0)
        run.update()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("arguments", [f"{LLAMA} --bf16", FP8.replace(" --fp8-emulate", "")])
def test_cuda_replays_what_the_layers_compute(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        run = Run(f"{arguments} --device cuda", "cuda")
        kept = [parameter.expand_as(parameter).grad_fn for parameter in run.parameters]  # as DeepSpeed keeps them
        run.compare([0, 1])
        compare_sums(run)
        assert len(kept) == len(run.parameters)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "layout",
    [
        "--bf16 --zero-stage 1",
        "--pipeline-model-parallel-size 2 --fp8-format hybrid --fp8-recipe tensorwise --fp8-emulate --bf16",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1",
    ],
)
def test_a_run_with_graphs_is_the_run_without(ranks: RankPools, layout: str) -> None:
    for (plain, _), (graphed, replays) in zip(
        *(ranks(2)(train, layout, name) for name in ("none", "local")), strict=True
    ):
        assert graphed == plain
        assert replays > 0
        assert len(set(plain["losses"])) == 4


def train(layout: str, impl: str) -> tuple[dict[str, Any], int]:
    """Losses and norms of four steps on this rank, and the replays of graphs."""
    with pytest.MonkeyPatch.context() as patched, stand_in_packages(patched):
        found = Accelerator()
        patched.setattr(layer_graphs, "get_accelerator", lambda: found)
        patched.setattr(devices, "DEVICES", (dataclasses.replace(CPU, replays_layers=True),))
        flags = f"{layouts.MODELS['llama_gqa_tied']} {layout} --cuda-graph-impl {impl}"
        return layouts.train(flags, 4), len(found.replays)


def test_an_engine_that_has_trained_is_freed(ranks: RankPools) -> None:
    assert ranks(1)(freed, "--bf16") == [True]


def freed(flags: str) -> bool:
    engine, task = layouts.build(f"{layouts.MODELS['llama_gqa_tied']} {flags}")
    engine.train_step(layouts.step_batches(engine, task, 0), consumed_samples=0, lr=1e-3)
    module = weakref.ref(engine.module)
    del engine, task
    gc.collect()
    return module() is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--hidden-dropout 0.1", "hidden_dropout=0.1"),
        ("--lora-rank 2 --lora-dropout 0.1", "lora_dropout=0.1"),
        ("--zero-stage 2", "zero_stage 2 or 3, offload or no_pipeline_parallel"),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", "pipeline_schedule=zero-bubble"),
        ("--tensor-model-parallel-size 2", "tensor_model_parallel_size=2"),
        ("--recompute-granularity full", "recompute_granularity=full"),
        ("--torch-compile", "torch_compile"),
        ("--kv-channels 16 --attention-window 8", "flex_attention, which ALiBi, windows and soft caps take on CUDA"),
        ("--log-max-attention-logit", "qk_clip or log_max_attention_logit"),
        ("--reset-attention-mask", "task=pretrain with documents packed into a row"),
    ],
)
def test_operators_that_change_from_pass_to_pass_are_refused(flags: str, named: str) -> None:
    words = f"{LLAMA} --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --device cuda --cuda-graph-impl local"
    config, _ = parse_arguments([*words.split(), *flags.split()])
    faults = [fault for fault in check(config, 2) if "cuda_graph_impl" in fault]
    assert len(faults) == 1
    assert f"cuda_graph_impl=local does not run with {named}" in faults[0]


def test_another_device_is_refused() -> None:
    config, _ = parse_arguments(
        [*LLAMA.split(), *"--train-iters 2 --global-batch-size 4 --device cpu --cuda-graph-impl local".split()]
    )
    assert "cuda_graph_impl=local replays CUDA graphs, but device=cpu; leave it out" in check(config, 1)
