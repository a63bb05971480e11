"""Adapters in float64 against transformers with scale * B A added to its weights, and against PEFT where it is there.

The gradients of A and B follow from transformers' gradient of the weight by the chain rule: with W' = W + s B A,
dB = s dW' A^T and dA = s B^T dW'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.registry import family_of
from megatron.parallel.shards import declared_shards
from tests.models.outputs import Array, Outputs, config_of, in_float64, run_in_float64
from tests.models.test_hf_logits import CASES, HEADS, SAMPLES, VOCABULARY, to_ours
from tests.ranks import RankPools

RANK, ALPHA, TOLERANCE = 4, 12.0, 1e-10
OURS = {
    "self_attn.q_proj": "attention.qkv lora_{}_q_proj",
    "self_attn.k_proj": "attention.qkv lora_{}_k_proj",
    "self_attn.v_proj": "attention.qkv lora_{}_v_proj",
    "self_attn.o_proj": "attention.dense lora_{}",
    "mlp.gate_proj": "mlp.gate_up lora_{}_gate_proj",
    "mlp.up_proj": "mlp.gate_up lora_{}_up_proj",
    "mlp.down_proj": "mlp.down lora_{}",
    "self_attention.query_key_value": "attention.qkv lora_{}",
    "self_attention.dense": "attention.dense lora_{}",
    "mlp.dense_h_to_4h": "mlp.up lora_{}",
    "mlp.dense_4h_to_h": "mlp.down lora_{}",
    "attn.c_attn": "attention.qkv lora_{}",
    "attn.c_proj": "attention.dense lora_{}",
    "mlp.c_fc": "mlp.up lora_{}",
    "mlp.c_proj": "mlp.down lora_{}",
    "model.embed_tokens": "embedding.word lora_embedding_{}",
    "transformer.word_embeddings": "embedding.word lora_embedding_{}",
    "transformer.wte": "embedding.word lora_embedding_{}",
    "lm_head": "output lora_{}",
}
"""Our linear layer and the names of its adapter's parameters, by transformers' module."""
OURS_BY_LAST = {name.split(".")[-1] for name in OURS}


TRANSPOSED = ("Conv1D", "Embedding")


@dataclass(frozen=True)
class Adapted:
    """A module of transformers with an adapter; A [r, in] and B [out, r] by its own order of rows."""

    name: str
    module: Any
    a: Tensor
    b: Tensor
    scale: float
    by_head: bool
    """Its rows are Bloom's, [head][q, k, v][size]; ours are [q, k, v][head][size]."""
    ours: tuple[str, str]
    """Our names of A and B."""

    def our_rows(self, rows: Tensor) -> Tensor:
        if not self.by_head:
            return rows
        return rows.view(HEADS, 3, -1, rows.shape[-1]).transpose(0, 1).reshape(rows.shape)

    def in_their_order(self, matrix: Tensor) -> Tensor:
        """Conv1D, GPT-2's, holds [in, out], and an embedding too. It is its own inverse."""
        return matrix.t() if type(self.module).__name__ in TRANSPOSED else matrix


def adapted_modules(
    model: Any, targets: Sequence[str], ranks: Mapping[str, int], scales: Mapping[str, float]
) -> Iterator[Adapted]:
    """Yield the adapters, random in all numbers, of the modules whose names end with a target."""
    generator = torch.Generator().manual_seed(11)
    for name, module in model.named_modules():
        short = ".".join(name.split(".")[-2:])
        last = short.split(".")[-1]
        number = next((part for part in name.split(".") if part.isdigit()), None)
        if short not in OURS or not (("all-linear" in targets and number) or last in targets):
            continue
        rows, columns = module.weight.shape[:: -1 if type(module).__name__ in TRANSPOSED else 1]
        rank, (layer, parameter) = ranks.get(last, RANK), OURS[short].split()
        if short == "lm_head" and model.config.tie_word_embeddings:
            layer = "embedding.word"
        prefix = f"layers.{number}.{layer}" if number else layer
        yield Adapted(
            name,
            module,
            torch.randn(rank, columns, generator=generator) * 0.2,
            torch.randn(rows, rank, generator=generator) * 0.2,
            scales.get(last, ALPHA / rank),
            last == "query_key_value",
            (f"{prefix}.{parameter.format('A')}", f"{prefix}.{parameter.format('B')}"),
        )


@dataclass(frozen=True)
class Reference:
    weights: dict[str, Array]
    """The base's and the adapters', by our names."""
    tokens: Array
    labels: Array
    outputs: Outputs
    """Gradients of the adapters, and of every parameter of the base."""


NOTHING: Mapping[str, Any] = {}


def their_model(name: str) -> Any:
    """transformers' model of a case, random in all numbers, norms and biases too."""
    model, generator = CASES[name]().theirs(), torch.Generator().manual_seed(5)
    model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "gelu_impl"):  # Bloom's own has eight digits of its constant
            module.gelu_impl = torch.nn.GELU("tanh")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm_weight = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_norm_weight else 0.0, 0.1, generator=generator)
    return model


def sample() -> tuple[Tensor, Tensor]:
    """Inputs and labels [B, S]."""
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, 25), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@in_float64()
def reference(
    name: str, targets: str, ranks: Mapping[str, int] = NOTHING, scales: Mapping[str, float] = NOTHING
) -> Reference:
    """transformers' model of a case with the adapters in its weights: of other `ranks` and `scales` by module."""
    arguments, theirs = CASES[name]().arguments, their_model(name)
    adapters = list(adapted_modules(theirs, targets.split(), ranks, scales))
    assert adapters
    weights = to_ours({n: p.detach().clone() for n, p in theirs.named_parameters()}, arguments)
    with torch.no_grad():
        if is_tied := theirs.config.tie_word_embeddings:  # what the adapters add is not tied
            theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
        for each in adapters:
            each.module.weight += each.in_their_order(each.scale * each.b @ each.a)
    inputs, labels = sample()
    logits = theirs(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    of_modules = {each.name: each.module.weight.grad.clone() for each in adapters}
    of_base = {n: p.grad for n, p in theirs.named_parameters() if not is_tied or n != "lm_head.weight"}
    if is_tied:
        of_base[_embedding_name(theirs)] += theirs.lm_head.weight.grad
    gradients = to_ours(of_base, arguments)
    for each in adapters:
        weights |= dict(zip(each.ours, (each.a, each.our_rows(each.b)), strict=True))
        of_weight = each.in_their_order(of_modules[each.name])
        of_a, of_b = each.scale * each.b.t() @ of_weight, each.scale * of_weight @ each.a.t()
        gradients |= dict(zip(each.ours, (of_a, each.our_rows(of_b)), strict=True))
    return Reference(
        {n: tensor.numpy() for n, tensor in weights.items()},
        inputs.numpy(),
        labels.numpy(),
        Outputs(
            logits.detach().transpose(0, 1).numpy(),
            float(loss.detach()),
            {n: tensor.numpy() for n, tensor in gradients.items()},
        ),
    )


def _embedding_name(model: Any) -> str:
    return next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)


def lora(name: str, targets: str, more: str = "") -> str:
    return f"{CASES[name]().arguments} --lora-rank {RANK} --lora-alpha {ALPHA} --lora-target-modules {targets} {more}"


def assert_equal(ours: Outputs, theirs: Reference, extra: Sequence[str] = ()) -> None:
    """Logits and loss, and the gradients of the adapters and of what is trained besides: ends of names."""
    expected = theirs.outputs
    assert expected.logits.std() > 0.3
    np.testing.assert_allclose(ours.logits, expected.logits, rtol=0, atol=TOLERANCE * np.abs(expected.logits).max())
    assert ours.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    trained = {n for n in expected.gradients if "lora_" in n or n.endswith(tuple(extra))}
    assert set(ours.gradients) == trained
    for n in trained:
        gradient, found = expected.gradients[n], ours.gradients[n]
        assert np.abs(gradient).max() > 1e-5, f"{n} has no gradient worth comparing"
        unpadded = tuple(slice(size) for size in gradient.shape)
        assert np.count_nonzero(found) == np.count_nonzero(found[unpadded]), f"{n}: the padding has a gradient"
        atol = TOLERANCE * np.abs(gradient).max()
        np.testing.assert_allclose(found[unpadded], gradient, rtol=0, atol=atol, err_msg=n)


def outputs(theirs: Reference, arguments: str) -> Outputs:
    return run_in_float64(arguments, theirs.weights, theirs.tokens, theirs.labels)


TARGETS = [
    ("llama_mha", "q_proj v_proj"),
    ("llama_mha", "all-linear"),
    ("llama_gqa", "q_proj v_proj"),
    ("llama_gqa", "k_proj up_proj down_proj"),
    ("llama_gqa", "all-linear"),
    ("llama_gqa_tied_wide_heads", "all-linear"),
    ("bloom_8_heads", "query_key_value"),
    ("bloom_8_heads", "all-linear"),
    ("gpt2", "c_attn c_proj"),
    ("gpt2", "all-linear"),
    ("llama_gqa", "embed_tokens lm_head"),
    ("llama_gqa_tied_wide_heads", "embed_tokens lm_head o_proj"),
    ("bloom_8_heads", "word_embeddings query_key_value"),
    ("gpt2", "lm_head all-linear"),
]


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_logits_and_gradients_are_those_of_the_merged_weights(name: str, targets: str) -> None:
    theirs = reference(name, targets)
    assert_equal(outputs(theirs, lora(name, targets)), theirs)


def test_scales_and_ranks_by_pattern() -> None:
    name, targets = "llama_gqa", "q_proj up_proj down_proj o_proj"
    ranks, alphas = {"q_proj": 7, "down_proj": 2}, {"up_proj": 5.0, "down_proj": 3.0}
    patterns = "--lora-rank-pattern q_proj=7 *.down_proj=2 --lora-alpha-pattern *.mlp.up_proj=5 down_proj=3"
    for rslora in (False, True):
        scales = {
            module: alphas.get(module, ALPHA) / (math.sqrt if rslora else float)(ranks.get(module, RANK))
            for module in targets.split()
        }
        theirs = reference(name, targets, ranks, scales)
        assert_equal(outputs(theirs, lora(name, targets, f"{patterns} {'--use-rslora' * rslora}")), theirs)


@pytest.mark.parametrize(
    ("name", "targets", "more", "extra"),
    [
        ("bloom_8_heads", "query_key_value", "--lora-bias all", ["bias"]),
        ("bloom_8_heads", "query_key_value", "--lora-bias lora_only", ["attention.qkv.bias"]),
        ("llama_gqa", "q_proj", "--lora-modules-to-save lm_head", ["output.weight"]),
        ("llama_gqa", "q_proj", "--lora-modules-to-save embed_tokens norm", ["word.weight", "final_norm.weight"]),
        ("llama_gqa_tied_wide_heads", "q_proj", "--lora-modules-to-save embed_tokens", ["word.weight"]),
        (
            "gpt2",
            "c_attn",
            "--lora-modules-to-save wpe mlp.c_proj",
            ["position.weight", "mlp.down.weight", "mlp.down.bias"],
        ),
    ],
)
def test_what_is_trained_whole(name: str, targets: str, more: str, extra: list[str]) -> None:
    theirs = reference(name, targets)
    assert_equal(outputs(theirs, lora(name, targets, more)), theirs, extra)


@pytest.mark.parametrize(
    ("name", "sequence"),
    [("llama_gqa", True), ("bloom_8_heads", False), pytest.param("gpt2", True, marks=pytest.mark.slow)],
)
def test_two_ranks_compute_what_one_does(ranks: RankPools, name: str, sequence: bool) -> None:
    """Every gradient, assembled from the ranks' parts, and alike on both where a rank holds the whole."""
    targets = "all-linear lm_head embed_tokens word_embeddings wte"
    theirs = reference(name, targets)
    arguments = f"{lora(name, targets)} --tensor-model-parallel-size 2 {'--sequence-parallel' * sequence}"
    both = ranks(2)(run_in_float64, arguments, theirs.weights, theirs.tokens, theirs.labels)
    shards = declared_shards(family_of(config_of(arguments)).layers(config_of(arguments)))
    gradients = {
        n: shards[n].assemble([torch.from_numpy(rank.gradients[n]) for rank in both]).numpy() for n in both[0].gradients
    }
    for n in gradients:
        if shards[n].dim is None:
            one, other = (rank.gradients[n] for rank in both)
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12, err_msg=n)
    for rank in both:
        assert_equal(dataclasses.replace(rank, gradients=gradients), theirs)


# ---------------------------------------------------------------------------------------------------------------------
# PEFT


@pytest.mark.parametrize(
    ("name", "targets", "rslora"),
    [
        # each with rsLoRA or without, in turn; -m slow: with both
        pytest.param(*case, rslora, marks=pytest.mark.slow if (place + rslora) % 2 else ())
        for place, case in enumerate(TARGETS)
        for rslora in (False, True)
    ],
)
def test_logits_and_gradients_are_pefts(name: str, targets: str, rslora: bool) -> None:
    peft: Any = pytest.importorskip("peft")
    theirs = reference(name, targets, scales=dict.fromkeys(OURS_BY_LAST, ALPHA / (RANK**0.5 if rslora else RANK)))
    with in_float64():
        expected = _of_peft(peft, name, targets, rslora)
    found = outputs(theirs, lora(name, targets, "--use-rslora" * rslora))
    assert_equal(found, dataclasses.replace(theirs, outputs=expected))


def _of_peft(peft: Any, name: str, targets: str, rslora: bool) -> Outputs:
    """`reference` computed by PEFT."""
    model = their_model(name)
    adapters = {each.name: each for each in adapted_modules(model, targets.split(), NOTHING, NOTHING)}
    options = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=rslora, fan_in_fan_out=name == "gpt2",
        target_modules=targets if targets == "all-linear" else [each.split(".")[-1] for each in adapters],
    )  # fmt: skip
    adapted = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    places = {each: adapted.get_submodule(f"base_model.model.{each}") for each in adapters}
    count = sum("lora_" in n for n, _ in adapted.named_parameters())
    assert count == 2 * len(adapters)
    with torch.no_grad():
        for each, module in places.items():
            for matrix, values in zip(_matrices(module), (adapters[each].a, adapters[each].b), strict=True):
                matrix.copy_(values)
    inputs, labels = sample()
    logits = adapted(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients: dict[str, Any] = {}
    for each, module in places.items():
        a, b = (matrix.grad for matrix in _matrices(module))
        gradients |= dict(zip(adapters[each].ours, (a.numpy(), adapters[each].our_rows(b).numpy()), strict=True))
    return Outputs(logits.detach().transpose(0, 1).numpy(), float(loss.detach()), gradients)


def _matrices(module: Any) -> list[Any]:
    """A and B of one of PEFT's modules."""
    if module.lora_A:
        return [module.lora_A["default"].weight, module.lora_B["default"].weight]
    return [module.lora_embedding_A["default"], module.lora_embedding_B["default"]]
