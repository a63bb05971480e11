"""A base held in nf4: the same model on every layout, from a start, a checkpoint or a folder of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.live_bytes import LiveBytes
from megatron.checkpoint.reader import newest_checkpoint
from megatron.models.registry import family_of
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators import nf4
from megatron.parallel.operators.nf4 import QuantizedWeight, quantized_weights
from megatron.parallel.shards import declared_shards, named_parameters
from megatron.resilience.replica_check import ReplicaCheck
from megatron.settings.command_line import load_config, parse_arguments
from megatron.training.engine import Engine
from megatron.weights.loader import find_checkpoint
from tests.ranks import RankPools
from tests.settings.faults import faults_of
from tests.training import layouts

MODELS = {
    "llama": f"{layouts.MODELS['llama_gqa']} --hidden-size 128 --ffn-hidden-size 256 --num-layers 2",
    "bloom": f"{layouts.MODELS['bloom_alibi']} --hidden-size 128 --num-attention-heads 8 --num-layers 2",
}
FROZEN = "--freeze *qkv.weight *dense.weight *mlp*.weight *word* output.weight"
NF4 = f"--quantize-base nf4 {FROZEN.replace(' output.weight', '')}"
STEPS = 3


def flags(model: str) -> str:
    return f"{MODELS[model]} {NF4} {'output.weight' if model == 'llama' else ''}"


def losses(engine: Engine, task: Any) -> list[float]:
    return [layouts.loss_of_step(engine, task, step) for step in range(STEPS)]


def dense_weights(engine: Engine) -> dict[str, np.ndarray]:
    return {name: weight.dense(torch.float32).numpy() for name, weight in quantized_weights(engine.module)}


def train(arguments: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, and the quantised weights after them."""
    engine, task = layouts.build(arguments)
    found = losses(engine, task)
    ReplicaCheck(engine.ctx, engine.state.held()).check(STEPS)
    return found, dense_weights(engine)


def train_both(arguments: str) -> tuple[list[float], list[float]]:
    """Losses with the quantised weights, and with dense ones that equal them."""
    engine, task = layouts.build(arguments)
    dense = dense_weights(engine)
    quantized = losses(engine, task)
    engine, task = layouts.build(arguments.replace("--quantize-base nf4", ""))
    with torch.no_grad():
        for name, parameter in named_parameters(engine.module):
            if name in dense:
                parameter.copy_(torch.from_numpy(dense[name]))
    return quantized, losses(engine, task)


@pytest.mark.parametrize(("model", "more"), [("llama", ""), ("bloom", "--bf16"), ("llama", "--bf16")])
def test_it_trains_as_a_dense_base_of_the_dequantised_weights(ranks: RankPools, model: str, more: str) -> None:
    ((quantized, dense),) = ranks(1)(train_both, f"{flags(model)} {more}")
    assert quantized == dense, "bit for bit"
    assert quantized[-1] < quantized[0]


LAYOUTS = {
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full",
    "pp2": "--pipeline-model-parallel-size 2",
    "zero3": "--zero-stage 3",
    "tp2": "--tensor-model-parallel-size 2 --recompute-granularity selective --recompute-modules mlp,layernorm",
}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model == "llama" else pytest.mark.slow) for model in MODELS]
)
def test_every_layout_trains_the_same_model(ranks: RankPools, model: str) -> None:
    ((expected, whole),) = ranks(1)(train, flags(model))
    for layout in ("tp2 sp", "pp2", "zero3") if model == "llama" else ("tp2",):
        results = ranks(2)(train, f"{flags(model)} {LAYOUTS[layout]}")
        assert results[0][0] == pytest.approx(expected, rel=2e-6), layout
        if layout == "pp2":
            assert_equal({**results[0][1], **results[1][1]}, whole)
        elif layout == "zero3":
            assert_equal(results[1][1], whole)
        else:
            assert_equal(assembled([found for _, found in results], model), whole)


def assembled(parts: list[dict[str, np.ndarray]], model: str) -> dict[str, np.ndarray]:
    shards = quantized_shards(model)
    return {name: shards[name].assemble([torch.from_numpy(part[name]) for part in parts]).numpy() for name in parts[0]}


def quantized_shards(model: str) -> dict[str, Any]:
    config, _ = parse_arguments([*layouts.COMMON.split(), *flags(model).split()])
    found = declared_shards(family_of(config).layers(config))
    return {name: shard for name, shard in found.items() if shard.quantized}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


def loaded(arguments: str, load: str) -> tuple[dict[str, np.ndarray], int, int]:
    """The quantised weights of a start from `load`, the most bytes that its restore allocated, and their number."""
    engine, _ = layouts.build(f"{arguments} --load {load} --finetune")
    start = find_checkpoint(engine.config, engine.ctx)
    assert start is not None
    live = LiveBytes([*engine.module.parameters(), *engine.module.buffers()])
    held = live.now
    read = start.read

    def unmapped(*arguments: Any) -> torch.Tensor:
        """Mapped files do not count as memory; what is read of them does, once it is used."""
        with _disable_current_modes():
            return read(*arguments)

    with patch.object(nf4, "QUANTIZED_AT_ONCE", 4096), patch.object(start, "read", unmapped), live:
        engine.state.restore(start, None)
    engine.state.finish_restore()
    numbers = sum(weight.shape[0] * weight.shape[1] for _, weight in quantized_weights(engine.module))
    return dense_weights(engine), live.peak - held, numbers


def test_a_checkpoint_and_a_folder_of_transformers_are_quantised_as_they_are_loaded(
    ranks: RankPools, tmp_path: Path
) -> None:
    saved, theirs = tmp_path / "saved", tmp_path / "theirs"
    ranks(1)(layouts.train_then_save, MODELS["llama"], 1, str(saved))
    sources = [(saved, newest_checkpoint(saved))]
    if export(saved, theirs):
        sources.append((theirs, sources[0][1]))
    for folder, checkpoint in sources:
        assert checkpoint is not None
        ((whole, peak, numbers),) = ranks(1)(loaded, flags("llama"), str(folder))
        parts = ranks(2)(loaded, f"{flags('llama')} --tensor-model-parallel-size 2", str(folder))
        for name, shard in quantized_shards("llama").items():
            weight = QuantizedWeight(name, shard, ParallelContext.single())
            full = checkpoint.read_full(name).reshape(-1)
            weight.fill(lambda start, count, full=full: full[start : start + count])  # type: ignore[misc]
            weight.finish()
            assert np.array_equal(weight.dense(torch.float32).numpy(), whole[name]), (folder, name)
        assert_equal(assembled([found for found, _, _ in parts], "llama"), whole)
        assert 0 < peak < 2 * numbers, "less than the layers in 16 bits"


def export(saved: Path, folder: Path) -> bool:
    """Convert the checkpoint to a folder of transformers; False where that is not installed."""
    from megatron.cli import convert_checkpoint

    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return convert_checkpoint.main(["--load", str(saved), "--save", str(folder), "--to", "hf"]) == 0


@pytest.mark.parametrize(
    ("more", "fault", "remedy"),
    [
        (FROZEN, "mlp.down.weight has 96; leave", "leave quantize_base out"),
        (
            f"{FROZEN} --ffn-hidden-size 192 --tensor-model-parallel-size 2",
            "layers.0.mlp.down.weight has 192 / tensor_model_parallel_size=2 = 96",
            "; use 1",
        ),
        ("--ffn-hidden-size 256", "every linear layer of the model is trained", "freeze=layers.*.mlp.*"),
        (f"{FROZEN} --ffn-hidden-size 256 --save out", "keeps no weights from which a checkpoint", "leave save out"),
    ],
)
def test_what_cannot_be_quantised_is_refused(more: str, fault: str, remedy: str) -> None:
    arguments = f"{layouts.MODELS['llama_gqa']} --num-layers 2 --hidden-size 128 --ffn-hidden-size 96 {more}"
    found = faults_of(f"--data-path none --train-iters 1 --quantize-base nf4 {arguments}", 2)
    assert len(found) == 1
    assert fault in found[0]
    assert remedy in found[0]


def test_frozen_linear_layers_alone_are_quantised_and_all_where_nothing_trains() -> None:
    arguments = f"{MODELS['llama']} --data-path none --train-iters 1 --quantize-base nf4"

    def found(more: str) -> set[str]:
        shards = declared_shards(family_of(config := load_config(f"{arguments} {more}".split())).layers(config))
        assert all(shard.quantized <= (not shard.trained) for shard in shards.values())
        return {name for name, shard in shards.items() if shard.quantized}

    mlp = {f"layers.{number}.mlp.{name}.weight" for number in range(2) for name in ("gate_up", "down")}
    attention = {f"layers.{number}.attention.{name}.weight" for number in range(2) for name in ("qkv", "dense")}
    assert found("--freeze *mlp* *norm* *word*") == mlp
    assert found("--skip-train --load folder") == mlp | attention


def test_adapters_on_a_quantised_base_train_alike_on_every_layout(ranks: RankPools) -> None:
    arguments = f"{MODELS['llama']} --quantize-base nf4 --lora-rank 4 --lora-alpha 16 --use-dora"
    ((expected, _),) = ranks(1)(train, arguments)
    for layout in ("tp2 sp", "pp2"):
        assert ranks(2)(train, f"{arguments} {LAYOUTS[layout]}")[0][0] == pytest.approx(expected, rel=2e-6), layout
