"""The whole model: documents packed or alone, activations kept or recomputed, one start on every layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.models.transformer import TransformerLayer
from megatron.options.stored import PRESETS_DIR
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.settings.command_line import parse_arguments
from tests.models.outputs import Array, build_model, config_of, context_of, logits_of, mean_loss
from tests.ranks import RankPools

SINGLE = ParallelContext.single()
MODELS = {
    "learned": "--architecture bloom --position-embedding-type learned",
    "alibi": "--architecture bloom --position-embedding-type alibi --embed-layernorm",
    "rope": "--architecture llama --position-embedding-type rope --num-query-groups 2 "
    "--untie-embeddings-and-output-weights",
}
VOCABULARY = 123


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


PACKED = "--reset-position-ids --reset-attention-mask --eod-token-id 7"
LENGTHS = [[9, 1, 14], [24]]


def packed_inputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions = [[place for length in sample for place in range(length)] for sample in LENGTHS]
    starts = [[sum(sample[:i]) for i, length in enumerate(sample) for _ in range(length)] for sample in LENGTHS]
    return tokens, torch.tensor(positions), torch.tensor(starts)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_logits_of_each_alone(name: str) -> None:
    # std: logits of ordinary size
    config = config_of(f"{MODELS[name]} {PACKED} --init-method-std 0.1")
    model, tokens = build_model(config, SINGLE), tokens_of(2, 24)
    packed = logits_of(model, packed_inputs(tokens), SINGLE)
    assert packed.std() > 0.3
    for sample, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            alone = logits_of(model, tokens[sample : sample + 1, begin : begin + length], SINGLE)
            torch.testing.assert_close(packed[begin : begin + length, sample], alone[:, 0], rtol=0, atol=1e-5)
            begin += length
    unpacked = logits_of(model, tokens, SINGLE)
    assert (unpacked[9:, 0] - packed[9:, 0]).abs().max() > 1e-2  # the documents would have seen each other


def packed_on_rank(arguments: str, tokens_BS: Array) -> Array:
    config = config_of(arguments)
    ctx = context_of(config)
    logits: Array = logits_of(build_model(config, ctx), packed_inputs(torch.from_numpy(tokens_BS)), ctx).numpy()
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_on_ranks_equal_one_process(ranks: RankPools, name: str) -> None:
    arguments = f"{MODELS[name]} {PACKED} --init-method-std 0.1"
    tokens = tokens_of(2, 24).numpy()
    expected = packed_on_rank(arguments, tokens)
    parallel = f"{arguments} --tensor-model-parallel-size 4 --sequence-parallel"
    for logits in ranks(4)(packed_on_rank, parallel, tokens):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS_DIR.glob("tiny_*.yaml")))
def test_tiny_presets_start_at_the_loss_of_a_uniform_guess(preset: str) -> None:
    """Tied weights with a large spread start above it: each token predicts itself."""
    config, _ = parse_arguments(["--config", preset, "--data-path", "none", "--device", "cpu"])
    size = config.model.vocab_size
    assert size is not None
    tokens = torch.randint(0, size, (4, config.training.seq_length + 1), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        loss = build_model(config, SINGLE)(tokens[:, :-1], project=mean_loss(tokens[:, 1:], SINGLE))
    assert float(loss) == pytest.approx(math.log(size), rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Recomputation


def step_gradients(arguments: str, packed: bool, microbatches: int = 2) -> dict[str, Array]:
    """Gradients of one step whose microbatches are all in flight before the first backward pass, as in a pipeline."""
    config = config_of(arguments)
    ctx = context_of(config)
    model = build_model(config, ctx)
    ctx.state.streams.seed_step(1, 0, ctx)
    losses = []
    for microbatch in range(microbatches):
        tokens = tokens_of(2, 25).roll(microbatch, 1)
        inputs: Any = packed_inputs(tokens[:, :-1].contiguous()) if packed else tokens[:, :-1].contiguous()
        if packed and microbatch:
            inputs = (*inputs[:2], torch.zeros_like(inputs[2]))  # other documents than the first
        losses.append(model(inputs, project=mean_loss(tokens[:, 1:].contiguous(), ctx)))
    for loss in losses:
        loss.backward()
    return {name: p.grad.numpy() for name, p in named_parameters(model) if p.grad is not None}


def assert_equal(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        assert gradient.any()
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-6 * np.abs(gradient).max(), err_msg=name)


DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.2"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_recomputation_changes_no_gradient_with_dropout_on(name: str, packed: bool) -> None:
    arguments = f"{MODELS[name]} {DROPOUT} {PACKED if packed else ''}"
    plain = step_gradients(f"{arguments} --recompute-granularity none", packed)
    for granularity in ("full", "selective"):
        assert_equal(step_gradients(f"{arguments} --recompute-granularity {granularity}", packed), plain)
    other = step_gradients(f"{arguments} --recompute-granularity none --hidden-dropout 0", packed)
    assert any(not np.allclose(other[name], plain[name], rtol=1e-2) for name in plain)  # dropout was on


PARTS = ["core_attn", "layernorm", "mlp", "mlp_act", "norm,mlp_act,core_attn", "layernorm mlp mlp_act"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_recomputing_parts_changes_no_gradient(name: str, kernels: str) -> None:
    arguments = f"{MODELS[name]} {DROPOUT} --kernels {kernels}"
    plain = step_gradients(arguments, False)
    for parts in PARTS:
        recomputed = step_gradients(f"{arguments} --recompute-granularity selective --recompute-modules {parts}", False)
        assert set(recomputed) == set(plain)
        for weight, gradient in plain.items():
            np.testing.assert_array_equal(recomputed[weight], gradient, err_msg=f"{parts}: {weight}")


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recomputation_on_ranks_changes_no_gradient_with_dropout_on(ranks: RankPools, sequence_parallel: bool) -> None:
    arguments = f"{MODELS['rope']} {DROPOUT} --tensor-model-parallel-size 4"
    arguments += " --sequence-parallel" if sequence_parallel else ""
    plain = ranks(4)(step_gradients, f"{arguments} --recompute-granularity none", False)
    for granularity in ("full", "selective", "selective --recompute-modules layernorm mlp_act"):
        recomputed = ranks(4)(step_gradients, f"{arguments} --recompute-granularity {granularity}", False)
        for ours, expected in zip(recomputed, plain, strict=True):
            assert_equal(ours, expected)
    if not sequence_parallel:  # where it does, the engine sums what is replicated already
        norms = [name for name in plain[0] if "norm" in name]
        for rank in plain[1:]:  # the residual stream was dropped alike: the ranks still hold one model
            for name in norms:
                np.testing.assert_allclose(rank[name], plain[0][name], rtol=0, atol=1e-7)


def test_recomputation_keeps_fewer_activations() -> None:
    def saved_bytes(granularity: str) -> int:
        config = config_of(f"{MODELS['rope']} --recompute-granularity {granularity}")
        model, tokens = build_model(config, SINGLE), tokens_of(2, 24)
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens, project=mean_loss(tokens, SINGLE))
        return kept

    none, selective, full = map(saved_bytes, ("none", "selective", "full"))
    assert full < 0.5 * none
    assert full < selective < none


class LiveBytes(TorchDispatchMode):
    """Counts the memory that was allocated inside and is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def total(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_recomputing_parts_saves_what_they_hold(name: str) -> None:
    rows, hidden, ffn, number = 2 * 24, 64, 96, 4

    def kept(parts: str) -> int:
        flags = f"--ffn-hidden-size {ffn} --num-layers 1" + (
            f" --recompute-granularity selective --recompute-modules {parts}" if parts else ""
        )
        model = build_model(config_of(f"{MODELS[name]} {flags}"), SINGLE)
        layer = next(module for module in model.modules() if isinstance(module, TransformerLayer))
        x = torch.randn(24, 2, hidden, requires_grad=True)
        for _ in range(2):  # the first time makes tables and masks
            with LiveBytes() as live:
                y = layer(x * 1.0)  # its input counts as well
            total = live.total
            del y
        return total

    none, norms, activation = kept(""), 2 * rows * hidden * number, rows * ffn * number
    inside = rows * ffn * (2 if name == "rope" else 1) * number  # what the activation reads
    assert none - kept("layernorm") == norms
    assert none - kept("mlp_act") == activation
    assert none - kept("layernorm,mlp_act") == norms + activation
    assert none - kept("mlp") == inside + activation
    statistics = rows * (1 if name == "rope" else 2) * number  # the second norm's, inside what is recomputed
    assert none - kept("mlp,layernorm") == inside + activation + norms + statistics


# ---------------------------------------------------------------------------------------------------------------------
# The start


def start_of(arguments: str) -> dict[str, Array]:
    config = config_of(arguments)
    return {name: p.detach().numpy() for name, p in named_parameters(build_model(config, context_of(config)))}


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_starts_from_the_same_model(ranks: RankPools, name: str) -> None:
    single = start_of(MODELS[name])
    parts = ranks(4)(start_of, f"{MODELS[name]} --tensor-model-parallel-size 4")
    model = build_model(config_of(f"{MODELS[name]}"), SINGLE)
    for parameter_name, parameter in named_parameters(model):
        shard = shard_of(parameter)
        pieces = [torch.from_numpy(part[parameter_name]) for part in parts]
        if shard.padding:  # as many rows of zeros as this layout needs
            whole = torch.cat(pieces)
            assert not whole[VOCABULARY:].any()
            np.testing.assert_array_equal(whole[:VOCABULARY], single[parameter_name][:VOCABULARY])
        else:
            np.testing.assert_array_equal(shard.assemble(pieces), single[parameter_name])


@pytest.mark.parametrize("name", MODELS)
def test_weights_start_with_megatrons_spread(name: str) -> None:
    # residual projections: std / sqrt(2 x layers)
    start = start_of(f"{MODELS[name]} --hidden-size 128 --num-layers 8 --init-method-std 0.02")
    for parameter_name, weight in start.items():
        if weight.ndim == 1:
            assert set(np.unique(weight)) == {1.0 if parameter_name.endswith("norm.weight") else 0.0}
            continue
        is_residual = parameter_name.endswith(("dense.weight", "down.weight"))
        rows = weight[:VOCABULARY]  # below are zeros, in what is as long as the vocabulary
        spread = 0.02 / 4 if is_residual else 0.02
        assert abs(rows.std() / spread - 1) < 0.05, parameter_name
        assert abs(rows.mean()) < 0.1 * spread, parameter_name


def test_no_two_layers_start_alike() -> None:
    start = start_of(MODELS["rope"])
    assert not np.array_equal(start["layers.0.attention.qkv.weight"], start["layers.1.attention.qkv.weight"])


def test_parameter_names_do_not_depend_on_what_is_tied() -> None:
    tied = start_of(MODELS["rope"].replace("--untie-embeddings-and-output-weights", ""))
    untied = start_of(MODELS["rope"])
    assert set(untied) - set(tied) == {"output.weight"}
    assert set(tied) < set(untied)


def test_evaluation_drops_nothing() -> None:
    model = build_model(config_of(f"{MODELS['alibi']} {DROPOUT} --recompute-granularity full"), SINGLE).eval()
    tokens = tokens_of(2, 24)
    assert torch.equal(logits_of(model, tokens, SINGLE), logits_of(model, tokens, SINGLE))
    model.train()
    assert not torch.equal(logits_of(model, tokens, SINGLE), logits_of(model, tokens, SINGLE))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_bfloat16_is_close_to_float32(name: str, packed: bool) -> None:
    model = build_model(config_of(f"{MODELS[name]} {PACKED if packed else ''} --init-method-std 0.1"), SINGLE)
    tokens = tokens_of(2, 24)
    inputs: Any = packed_inputs(tokens) if packed else tokens
    exact = logits_of(model, inputs, SINGLE)
    model.bfloat16()
    close = logits_of(model, inputs, SINGLE)
    assert close.dtype == torch.bfloat16
    torch.testing.assert_close(close.float(), exact, rtol=0, atol=0.15)
    model(inputs, project=mean_loss(tokens, SINGLE)).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7)])
def test_odd_shapes_pass(name: str, shape: tuple[int, int]) -> None:
    tokens = tokens_of(*shape)
    model = build_model(config_of(MODELS[name]), SINGLE)
    assert logits_of(model, tokens, SINGLE).shape == (shape[1], shape[0], VOCABULARY)
    loss = model(tokens, project=mean_loss(tokens, SINGLE))
    loss.backward()
    assert torch.isfinite(loss)
