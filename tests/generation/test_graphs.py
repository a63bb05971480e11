"""Decoding by graphs of a device, with a stand-in for its graphs that replays the recorded operators."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import pytest
import torch
from deepspeed.accelerator.hpu_accelerator import HPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megatron.config.options import ConfigError
from megatron.generation import graphs
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Request
from megatron.models.sequential import SequentialModel, build_layers
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from tests.generation.outputs import inference_model
from tests.habana import stand_in_packages
from tests.models.outputs import config_of
from tests.models.test_kv_cache import ALIBI, LLAMA


class Recorder(TorchDispatchMode):
    """A graph: operators over fixed memory, run again as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        self.calls.append((function, args, kwargs or {}, outputs))
        return result

    def replay(self) -> None:
        for function, args, kwargs, outputs in self.calls:
            again = [each for each in tree_flatten(function(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Accelerator:
    """The functions of DeepSpeed's accelerator that capture and replay."""

    def __init__(self) -> None:
        self.replays: list[Recorder] = []
        self.graphs: list[Recorder] = []

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
    def create_graph(self) -> Recorder:
        self.graphs.append(Recorder())
        return self.graphs[-1]

    def capture_to_graph(self, graph: Recorder, pool: Any = None) -> Recorder:
        assert pool is None
        return graph

    def replay_graph(self, graph: Recorder) -> None:
        self.replays.append(graph)
        graph.replay()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = Accelerator()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: found)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    # which take addresses, so the recorder would not see them
    monkeypatch.setattr("megatron.parallel.token_kernels.takes", lambda *tensors: False)
    return found


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
        captured = graphs.PassGraphs(torch.device("hpu"))
        weight = torch.arange(6.0).reshape(3, 2)
        for value in (1.0, -2.0, 5.0):
            x = torch.full((1, 3), value)
            assert torch.equal(captured.run("shape", lambda x: (x @ weight).relu(), (x,)), (x @ weight).relu())
        captured.run("other", lambda x: x * 2, (torch.ones(4),))
        assert len(habana.called("capture_begin")) == 2  # one a key
        assert len(habana.called("replay")) == 4  # one a call
        assert len(habana.called("synchronize")) == 2  # none but at a capture


def test_a_device_without_graphs_is_named() -> None:
    with pytest.raises(ConfigError, match="use_graphs is for cuda and hpu devices, not cpu; leave it out"):
        graphs.check_graphs(torch.device("cpu"))


def test_hpu_graphs_need_lazy_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for lazy, refused in ((True, False), (False, True)):
        with (
            stand_in_packages(monkeypatch, lazy=lazy),
            pytest.raises(ConfigError, match="on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1")
            if refused
            else contextlib.nullcontext(),
        ):
            graphs.check_graphs(torch.device("hpu"))


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
    ctx = dataclasses.replace(ParallelContext.single(), device=torch.device(device), tensor_size=ranks)
    assert graphs.uses_graphs(chosen, ctx) == expected
    line = graphs.describe_choice(ctx)
    assert bool(line) == (device == "cuda")
    assert ("off" in line) == (device == "cuda" and ranks == 2)
