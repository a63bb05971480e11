"""Decoding by graphs of a device, with a stand-in for its graphs that replays the recorded operators."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator

from megatron.generation import graphs
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Request
from megatron.models.attention.kernels import AttentionMask
from megatron.models.positions import Packing
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.runtime import devices
from megatron.runtime.device_cpu import CPU
from tests.generation.outputs import inference_model
from tests.habana import stand_in_packages
from tests.models.outputs import config_of
from tests.models.test_kv_cache import ALIBI, LLAMA


class Accelerator:
    """The functions of DeepSpeed's accelerator that capture and replay, over the graphs of Habana's stand-in."""

    def __init__(self) -> None:
        self.library = importlib.import_module("habana_frameworks.torch.hpu.graphs")
        self.replays: list[Any] = []
        self.graphs: list[Any] = []

    def device_name(self) -> str:
        return "cpu"

    def Stream(self) -> Any:
        return self

    def wait_stream(self, _stream: Any) -> None: ...
    def current_stream(self) -> Any:
        return self

    def stream(self, _stream: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self) -> None: ...
    def create_graph(self) -> Any:
        self.graphs.append(self.library.HPUGraph())
        return self.graphs[-1]

    def capture_to_graph(self, graph: Any, pool: Any = None) -> Any:
        assert pool is None
        return self.library.graph(graph)

    def replay_graph(self, graph: Any) -> None:
        self.replays.append(graph)
        graph.replay()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with stand_in_packages(monkeypatch):
        found = Accelerator()
        monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: found)
        monkeypatch.setattr(devices, "DEVICES", (dataclasses.replace(CPU, graphs="CPU"),))
        # which take addresses, so the recorder would not see them
        monkeypatch.setattr("megatron.parallel.operators.token_kernels.takes", lambda *tensors: False)
        yield found


def on(device: str, ranks: int = 1) -> ParallelContext:
    return dataclasses.replace(ParallelContext.single(), device=torch.device(device), tensor_size=ranks)


@pytest.mark.parametrize("arguments", [ALIBI, LLAMA], ids=["bloom", "llama"])
def test_replayed_graphs_give_the_same_texts(arguments: str, accelerator: Accelerator) -> None:
    model = SequentialModel(build_layers(config_of(arguments), ParallelContext.single()))
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(shard_of(parameter).shape, generator=generator).mul_(0.3).numpy()
        for name, parameter in named_parameters(model)
    }
    ours = inference_model(arguments, weights, is_alone=True)
    requests = [Request(number, tuple(range(1, 30 * number + 5))) for number in range(4)]
    options = GenerationOptions(max_new_tokens=40, repetition_penalty=2.0)
    plain = list(generate(ours, requests, options, settings=BatchSettings(batch_size=2)))
    assert not accelerator.replays
    replayed = list(generate(ours, requests, options, settings=BatchSettings(batch_size=2, use_graphs=True)))
    assert replayed == plain
    assert len({each.ids for each in plain}) == 4
    assert len(accelerator.graphs) == 3  # the lengths that are read: 64, 128 and 192
    assert len(accelerator.replays) > 70


def test_hpu_graphs_are_those_of_habanas_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through DeepSpeed's own accelerator, over the stand-in of the package."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    with stand_in_packages(monkeypatch) as habana:
        monkeypatch.setattr(os, "environ", dict(os.environ))
        found = HPU_Accelerator()
        torch.use_deterministic_algorithms(deterministic)  # it changes this for the process
        monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: found)
        captured = graphs.PassGraphs(on("hpu"))
        weight = torch.arange(6.0).reshape(3, 2)
        for value in (1.0, -2.0, 5.0):
            x = torch.full((1, 3), value)
            assert torch.equal(captured.run("shape", lambda x: (x @ weight).relu(), (x,)), (x @ weight).relu())
        captured.run("other", lambda x: x * 2, (torch.ones(4),))
        assert len(habana.called("capture_begin")) == 2  # one a key
        assert len(habana.called("replay")) == 4  # one a call
        assert len(habana.called("synchronize")) == 2  # none but at a capture


def test_a_graph_takes_the_shapes_and_reads_the_memory_of_its_capture(accelerator: Accelerator) -> None:
    captured = graphs.PassGraphs(on("cpu"), most=2)
    weight, table = torch.arange(6.0).reshape(3, 2), [torch.ones(2)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ weight + table[0]

    x = torch.ones(1, 3)
    captured.run("a", forward, (x,))
    weight.mul_(2)  # as an update does
    table[0] = torch.ones(2)  # as a longer table replaces one; the graph has kept the first
    assert torch.equal(captured.run("a", forward, (x,)), forward(x))
    for wrong in (torch.ones(3), torch.ones(1, 3, dtype=torch.float64)):  # which copy_ would repeat, and convert
        with pytest.raises(ValueError, match=r"captured for \(1, 3\) torch.float32 cannot take"):
            captured.run("a", forward, (wrong,))
    for key in "bcd":  # no more than two are captured
        assert torch.equal(captured.run(key, forward, (x,)), forward(x))
    assert captured.count == len(accelerator.graphs) == 2


def test_a_mask_is_computed_in_the_graph(accelerator: Accelerator) -> None:
    """It is kept from one layer to the next, and follows from an input of the graph."""
    captured, masks = graphs.PassGraphs(on("cpu")), AttentionMask()

    def mask(starts: torch.Tensor) -> torch.Tensor | None:
        return masks.get(Packing(starts, starts), 4, 4, torch.float32, starts.device)

    for starts in ([0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 2, 2]):
        given = torch.tensor([starts])
        expected = AttentionMask().get(Packing(given, given), 4, 4, torch.float32, given.device)
        found = captured.run("row", mask, (given,))
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_the_stand_in_refuses_what_a_graph_cannot_hold(accelerator: Accelerator) -> None:
    captured, x = graphs.PassGraphs(on("cpu")), torch.arange(4.0)
    forbidden: dict[str, Callable[[torch.Tensor], Any]] = {
        "item": lambda x: x * x[0].item(),
        "bool": lambda x: x if x[0] > 0 else x * 2,
        "tolist": lambda x: x * sum(x.tolist()),
        "index": lambda x: x[x > 1],
        "nonzero": lambda x: x.nonzero(),
    }
    for name, function in forbidden.items():
        with pytest.raises(RuntimeError, match="is not supported during HPU Graph capturing"):
            captured.run(name, function, (x,))
    # what a capture makes on the host is gone when the graph runs again
    graph = accelerator.library.HPUGraph()
    with accelerator.library.graph(graph):
        _ = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(RuntimeError, match="freed after its capture"):
        graph.replay()


def test_a_device_without_graphs_is_named() -> None:
    with pytest.raises(ConfigError, match="use_graphs is for cuda and hpu devices, not cpu; leave it out"):
        graphs.check_graphs(on("cpu"))


def test_hpu_graphs_need_lazy_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for lazy, refused in ((True, False), (False, True)):
        with (
            stand_in_packages(monkeypatch, lazy=lazy),
            pytest.raises(ConfigError, match="on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1")
            if refused
            else contextlib.nullcontext(),
        ):
            graphs.check_graphs(on("hpu"))


@pytest.mark.parametrize(
    ("device", "ranks", "chosen", "expected"),
    [
        ("cuda", 1, None, True),
        ("cuda", 2, None, False),
        ("cuda", 2, True, True),
        ("cuda", 1, False, False),
        ("hpu", 1, None, False),
        ("cpu", 1, None, False),
    ],
)
def test_graphs_are_the_default_on_cuda(device: str, ranks: int, chosen: bool | None, expected: bool) -> None:
    ctx = on(device, ranks)
    assert graphs.uses_graphs(chosen, ctx) == expected
    line = graphs.describe_choice(ctx)
    assert bool(line) == (device == "cuda")
    assert ("off" in line) == (device == "cuda" and ranks == 2)
