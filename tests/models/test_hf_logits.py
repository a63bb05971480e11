"""The same weights give the same logits, loss and gradients as transformers' GPT2, Bloom and Llama.

Weights and gradients are carried over by the name map that conversion uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.sequential import SequentialModel, build_layers
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.weights.huggingface import name_map
from tests.models.outputs import COMMON, Array, Outputs, config_of, run
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, LAYERS, VOCABULARY, SAMPLES = 64, 8, 2, 123, 2

State = dict[str, Tensor]
"""Weights, or their gradients, by transformers' names."""


def to_ours(theirs: State, arguments: str) -> State:
    """By our names, each of theirs used once."""
    mapped = name_map(config_of(arguments))
    assert sorted(part.name for parts in mapped.parts.values() for part in parts) == sorted(theirs)
    return {name: mapped.assemble(name, lambda part, begin, end: theirs[part][begin:end]) for name in mapped.parts}


# ---------------------------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True)
class Case:
    """A model of theirs, and the flags that describe it to us."""

    theirs: Callable[[], Any]
    arguments: str


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=40, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    # more positions than tokens: the table's first rows are used
    arguments = "--architecture bloom --position-embedding-type learned --max-position-embeddings 40"
    return Case(lambda: transformers.GPT2LMHeadModel(config), arguments)


def bloom(num_heads: int) -> Case:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=8 * num_heads, n_layer=LAYERS, n_head=num_heads,
        hidden_dropout=0.0, attention_dropout=0.0, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    return Case(
        lambda: transformers.BloomForCausalLM(config),
        "--architecture bloom --position-embedding-type alibi --embed-layernorm "
        f"--hidden-size {8 * num_heads} --num-attention-heads {num_heads}",
    )


def llama(groups: int = HEADS, tied: bool = False, head_size: int = 8, scaled: bool = False) -> Case:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    arguments = f"--architecture llama --position-embedding-type rope --num-query-groups {groups} --norm-epsilon 1e-6"
    arguments += f" --ffn-hidden-size 96 --kv-channels {head_size}"
    arguments += "" if tied else " --untie-embeddings-and-output-weights"
    if scaled:
        # sequences of 24 are three times the original context: all three kinds of wavelength occur
        rope = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
        }  # fmt: skip
        arguments += " --rotary-base 500000 --rope-scaling-factor 8 --rope-scaling-original-length 8"
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=groups, head_dim=head_size, max_position_embeddings=64,
        rms_norm_eps=1e-6, tie_word_embeddings=tied, rope_parameters=rope, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    return Case(lambda: transformers.LlamaForCausalLM(config), arguments)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "bloom_8_heads": lambda: bloom(8),
    "bloom_12_heads": lambda: bloom(12),
    "llama_mha": llama,
    "llama_gqa": lambda: llama(groups=2),
    "llama_gqa_tied_wide_heads": lambda: llama(groups=4, tied=True, head_size=16),
    "llama_3.1": lambda: llama(groups=2, scaled=True, head_size=16),
}


@dataclass(frozen=True)
class Reference:
    """Their model's outputs, and its weights under our names."""

    case: Case
    weights: dict[str, Array]
    tokens: Array
    labels: Array
    outputs: Outputs


def reference(name: str) -> Reference:
    case = CASES[name]()
    model = case.theirs()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # norms too, and every bias: a one or a zero hides a forgotten weight
            is_norm_weight = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_norm_weight else 0.0, 0.1, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, 25), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    logits = model(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    weights = to_ours({name: p.detach() for name, p in model.named_parameters()}, case.arguments)
    gradients = to_ours({name: p.grad for name, p in model.named_parameters()}, case.arguments)
    return Reference(
        case,
        {name: tensor.numpy() for name, tensor in weights.items()},
        inputs.numpy(),
        labels.numpy(),
        Outputs(
            logits.detach().transpose(0, 1).numpy(),
            float(loss.detach()),
            {name: tensor.numpy() for name, tensor in gradients.items()},
        ),
    )


def assert_equal(ours: list[Outputs], theirs: Reference) -> None:
    """Logits and loss of every rank, and the gradients that the ranks hold together."""
    # logits that hardly differ would agree by accident
    assert theirs.outputs.logits.std() > 0.3
    for rank in ours:
        np.testing.assert_allclose(rank.logits, theirs.outputs.logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(rank.loss, theirs.outputs.loss, rtol=1e-6)
        assert set(rank.gradients) == set(theirs.outputs.gradients)
    single = SequentialModel(build_layers(config_of(theirs.case.arguments), ParallelContext.single()))
    for name, parameter in named_parameters(single):
        # the padding of the vocabulary depends on the layout, and is no part of what is assembled
        pieces = [torch.from_numpy(rank.gradients[name]) for rank in ours]
        full = shard_padded(shard_of(parameter), pieces).numpy()
        expected = theirs.outputs.gradients[name]
        assert np.abs(expected).max() > 1e-4, f"{name} has no gradient worth comparing"
        np.testing.assert_allclose(full, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=name)


def shard_padded(shard: Any, pieces: list[Tensor]) -> Tensor:
    """`shard.assemble(pieces)` with the padding that these pieces have."""
    if shard.dim is None:
        for piece in pieces[1:]:
            torch.testing.assert_close(piece, pieces[0], rtol=0, atol=1e-7)
        return shard.assemble(pieces)  # type: ignore[no-any-return]
    rows = sum(piece.shape[shard.dim] for piece in pieces)
    padding = rows - shard.shape[shard.dim]
    return type(shard)(shard.shape, shard.dim, shard.pieces, padding).assemble(pieces)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_equal_transformers(name: str) -> None:
    theirs = reference(name)
    assert_equal([run(theirs.case.arguments, theirs.weights, theirs.tokens, theirs.labels)], theirs)


@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"),
    [
        ("gpt2", 2, True),
        ("bloom_12_heads", 4, False),
        pytest.param("bloom_12_heads", 2, True, marks=pytest.mark.slow),
        pytest.param("llama_3.1", 2, False, marks=pytest.mark.slow),
        ("llama_3.1", 4, True),  # 2 key/value heads on 4 ranks
        pytest.param("llama_gqa", 4, False, marks=pytest.mark.slow),
        ("llama_gqa_tied_wide_heads", 4, True),
    ],
)
def test_ranks_equal_transformers(ranks: RankPools, name: str, tp: int, sequence_parallel: bool) -> None:
    theirs = reference(name)
    arguments = f"{theirs.case.arguments} --tensor-model-parallel-size {tp}"
    arguments += " --sequence-parallel" if sequence_parallel else ""
    assert_equal(ranks(tp)(run, arguments, theirs.weights, theirs.tokens, theirs.labels), theirs)


def test_rope_scaling_matters_in_the_comparison() -> None:
    theirs = reference("llama_3.1")
    unscaled = re.sub(r"--rope-scaling-\S+ \S+", "", theirs.case.arguments)
    ours = run(unscaled, theirs.weights, theirs.tokens, theirs.labels)
    assert np.abs(ours.logits - theirs.outputs.logits).max() > 1e-2


def test_cases_are_as_large_as_they_say() -> None:
    assert f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS}" in COMMON
    assert f"--vocab-size {VOCABULARY}" in COMMON
