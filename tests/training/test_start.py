"""The start of a run: it imports what it needs, and the optimizer that does so is torch's bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.optimizers import build as optimizers
from tests import runs

ROOT = Path(__file__).resolve().parent.parent.parent
UNNEEDED = (
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "sympy"),
    *("matplotlib", "pandas", "tokenizers", "transformers", "pyarrow", "wandb", "mlflow", "tensorboard", "fsspec"),
    *("setuptools", "distutils.ccompiler"),  # by which DeepSpeed calls a compiler for each of its operators
)

# Imports as a fork server does, then runs as a rank does.
RUN = """
import os, sys, threading
import megatron.launch.preload
assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, "a fork would lose threads"
from megatron import train
preloaded = set(sys.modules)
with train.Signals() as signals:
    status = train.start(signals)
roots = ("megatron.", "numpy.", "deepspeed.", "encodings.")
late = sorted(name for name in sys.modules if name.startswith(roots) and name not in preloaded)
print("after the fork:", *late)
print("imported:", *(name for name in sys.argv[0].split(",") if name in sys.modules))
train.leave(status)
"""


def test_a_run_imports_what_it_needs_before_the_fork_and_nothing_else(tmp_path: Path) -> None:
    runs.write_dataset(tmp_path / "text")
    flags = f"{runs.TINY} --config tiny_bloom --train-samples 80 --lr-warmup-samples 0 --exit-interval 2 --bf16"
    script = f"import sys; sys.argv[0] = {','.join(UNNEEDED)!r}\n{RUN}"
    result = subprocess.run(
        [sys.executable, "-c", script, *flags.split(), "--data-path", str(tmp_path / "text")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["after the fork:", "imported:"], result.stdout


STAGE = """
import sys
import megatron.launch.preload
import torch
preloaded = set(sys.modules)
torch.ones(2, requires_grad=True).mul(2).backward(torch.ones(2))
print("after the fork:", *sorted(set(sys.modules) - preloaded)[:3])
"""


def test_the_backward_pass_of_a_stage_imports_nothing_after_the_fork() -> None:
    result = subprocess.run(
        [sys.executable, "-c", STAGE],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_PIPELINE": "1", "DS_ACCELERATOR": ""},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "after the fork:\n", result.stdout + result.stderr


EVENTS = """
import os, sys, threading
import megatron.launch.preload
assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1, "a fork would lose threads"
preloaded = set(sys.modules)
from megatron.observability.metric_writers import TensorBoardLog
log = TensorBoardLog(sys.argv[1])
log.write({"loss": 1.0}, 1)
print("after the fork:", *sorted(set(sys.modules) - preloaded)[:3])
"""


def test_the_log_of_a_run_with_results_imports_nothing_after_the_fork(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EVENTS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MEGATRON_TENSORBOARD": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "after the fork:\n", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_an_optimizer_without_the_compiler_is_torchs(cls: Any, arguments: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator)
    gradients = [torch.randn(64, generator=generator) for _ in range(3)]
    found = []
    own = getattr(optimizers, cls.__name__)
    for make in (cls, lambda *groups, **options: optimizers.GatedOptimizer(own(*groups, **options))):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make([parameter], lr=0.1, **arguments)
        optimizer.load_state_dict(optimizer.state_dict())
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
        assert not parameter.grad
        found.append((parameter.detach(), optimizer.state_dict()))
    (expected, state), (weights, own_state) = found
    assert torch.equal(weights, expected)
    assert own_state["param_groups"] == state["param_groups"]
    for key, value in state["state"][0].items():
        assert own_state["state"][0][key] is value is None or torch.equal(own_state["state"][0][key], value)
