"""Paged AdamW: bitsandbytes' states are those of AdamW to checkpoints, and its updates pass the gate."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.options.config import ConfigError
from megatron.settings.command_line import load_config
from megatron.training.optimizers import build as optimizers
from tests.settings.faults import VALID, faults_of

FLAGS = [*VALID, "--optimizer", "paged_adamw_32bit", "--clip-grad", "0"]


class StandIn(torch.optim.Optimizer):
    """The part of bitsandbytes' interface that is used: states made by `init_state` at the first step."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        assert self.param_groups[gindex]["params"][pindex] is p
        self.state[p] |= {"step": 0, "state1": torch.zeros_like(p), "state2": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for gindex, group in enumerate(self.param_groups):
            (beta1, beta2), lr = group["betas"], group["lr"]
            for pindex, p in enumerate(group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    self.init_state(group, p, gindex, pindex)
                state["step"] += 1
                assert isinstance(state["step"], int), "it is passed to C"
                assert p.grad is not None
                state["state1"].lerp_(p.grad, 1 - beta1)
                state["state2"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (state["state2"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * state["state1"] / (1 - beta1 ** state["step"]) / root)


@pytest.fixture(params=["stand-in", "bitsandbytes"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.training.optimizers.paged_adamw", raising=False)
    if request.param == "bitsandbytes":
        pytest.importorskip("bitsandbytes.optim")
        return
    package, module = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    module.PagedAdamW32bit = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", module)


def built(device: str) -> tuple[Any, nn.Parameter]:
    options = load_config([*FLAGS, "--lr", "1e-2"]).optimizer
    parameter = nn.Parameter(torch.linspace(-1, 1, 96).view(8, 12))
    ctx: Any = SimpleNamespace(device=torch.device(device), rank=0)
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    return optimizers.GatedOptimizer(optimizers.BUILDERS[options.optimizer](groups, options, ctx)), parameter


def steps(optimizer: Any, parameter: nn.Parameter, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.usefixtures("installed")
def test_it_updates_as_adamw_and_continues_its_moments() -> None:
    (paged, ours), (plain, expected) = built("cuda"), built("cpu")
    steps(paged, ours, range(3))
    steps(plain, expected, range(3))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    moments = {kind: paged.state[ours][kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
    for kind, moment in moments.items():
        torch.testing.assert_close(moment, plain.state[expected][kind], rtol=1e-5, atol=1e-8)
    resumed, other = built("cuda")
    for _ in range(2):  # a rollback allocates what is there
        resumed.allocate_states([other], ["exp_avg", "exp_avg_sq"], 3.0, counts=True)
    with torch.no_grad():
        other.copy_(ours)
        for kind, moment in moments.items():
            resumed.state[other][kind].copy_(moment)
    steps(paged, ours, range(3, 5))
    steps(resumed, other, range(3, 5))
    assert torch.equal(ours, other), "bit for bit"


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.usefixtures("installed")
def test_a_closed_gate_changes_nothing() -> None:
    optimizer, parameter = built("cuda")
    before = parameter.detach().clone()
    optimizer.gate = SimpleNamespace(is_open=lambda: False)
    steps(optimizer, parameter, range(1))
    assert torch.equal(parameter, before)
    assert not optimizer.state[parameter]


@pytest.mark.parametrize(("device", "text"), [("cpu", "in host memory"), ("xpu", "offload_optimizer can offload")])
def test_elsewhere_it_is_adamw_and_says_so(device: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        optimizer, _ = built(device)
    assert isinstance(optimizer.inner, torch.optim.AdamW)
    assert f"on {device} it is adamw" in caplog.text
    assert text in caplog.text


def test_it_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.training.optimizers.paged_adamw", raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        built("cuda")
    (fault,) = faults_of([*FLAGS, "--zero-stage", "1", "--offload-optimizer"])
    assert "does not support optimizer=paged_adamw_32bit" in fault
