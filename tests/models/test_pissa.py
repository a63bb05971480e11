"""PiSSA: adapters that start from the principal singular vectors of their weights, which the base keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.models.registry import family_of
from megatron.parallel.shards import declared_shards, named_parameters
from tests.models import test_adapters as lora
from tests.models import test_dora as dora
from tests.models.outputs import Array, config_of, in_float64
from tests.models.test_hf_logits import CASES, to_ours
from tests.ranks import RankPools
from tests.training import layouts

NAME, TARGETS = "llama_gqa", "q_proj v_proj down_proj embed_tokens lm_head"


@pytest.mark.parametrize("more", ["", "--use-dora"])
def test_the_adapters_start_is_subtracted_from_their_output(more: str) -> None:
    """The adapters' changes on W equal those on W - scale * B0 A0, which is in the reference's weights."""
    theirs = dora.reference(NAME, TARGETS) if more else lora.reference(NAME, TARGETS)
    generator, scale, weights = np.random.default_rng(2), lora.ALPHA / lora.RANK, dict(theirs.weights)
    for name, shard in declared_shards(family_of(config := config_of(flags(more))).layers(config)).items():
        if "lora_start" in name:
            weights[name] = generator.standard_normal(shard.shape) * 0.1
    for name in [name for name in weights if "lora_start_A" in name]:
        layer, _, last = name.rpartition(".")
        rows = {"lora_start_A_q_proj": slice(0, 64), "lora_start_A_v_proj": slice(-16, None)}.get(last, slice(None))
        changed = weights[f"{layer}.weight"].copy()
        changed[rows] += scale * weights[name.replace("start_A", "start_B")] @ weights[name]
        weights[f"{layer}.weight"] = changed
    found = lora.outputs(dataclasses.replace(theirs, weights=weights), flags(more))
    lora.assert_equal(found, theirs)


def flags(more: str) -> str:
    return lora.lora(NAME, TARGETS, f"--lora-init pissa {more}")


LLAMA = f"{layouts.MODELS['llama_gqa']} --lora-rank 4 --lora-alpha 12 --lora-target-modules {TARGETS}"


def started(arguments: str) -> tuple[float, dict[str, Array]]:
    """The first loss, and this rank's parts of the base and the adapters at the start."""
    engine, task = layouts.build(arguments)
    found = {name: parameter.detach().clone().numpy() for name, parameter in named_parameters(engine.module)}
    return layouts.loss_of_step(engine, task, 0), found


def test_it_starts_from_the_principal_vectors_on_every_layout(ranks: RankPools) -> None:
    ((plain, _),) = ranks(1)(started, LLAMA.replace("embed_tokens", ""))
    ((loss, whole),) = ranks(1)(started, f"{LLAMA} --lora-init pissa")
    assert loss == pytest.approx(plain, rel=1e-5), "a new adapter changes nothing"
    for module, rows, suffix in (
        ("layers.1.attention.qkv", slice(0, 64), "_q_proj"),
        ("layers.3.mlp.down", slice(None), ""),
        ("output", slice(0, 250), ""),
    ):
        a, b = (whole[f"{module}.lora_{name}{suffix}"] for name in "AB")
        u, s, v = np.linalg.svd(whole[f"{module}.weight"][rows].astype(np.float64), full_matrices=False)
        np.testing.assert_allclose(3 * (b @ a)[: len(u)], u[:, :4] * s[:4] @ v[:4], rtol=0, atol=1e-6)
        np.testing.assert_allclose(3 * a @ a.T, np.diag(s[:4]), rtol=0, atol=1e-6)
        assert np.array_equal(a, whole[f"{module}.lora_start_A{suffix}"])
    config = layouts.parse_arguments([*layouts.COMMON.split(), *f"{LLAMA} --lora-init pissa".split()])[0]
    shards = declared_shards(family_of(config).layers(config))
    parts = ranks(2)(started, f"{LLAMA} --lora-init pissa --tensor-model-parallel-size 2 --sequence-parallel")
    assert parts[0][0] == pytest.approx(loss, rel=1e-6)
    for name, expected in whole.items():
        found = shards[name].assemble([torch.from_numpy(part[name]) for _, part in parts])
        assert np.array_equal(found.numpy(), expected[tuple(slice(size) for size in found.shape)]), name
    (approximate, _), _ = ranks(2)(started_sharded, f"{LLAMA} --lora-init pissa_niter_4 --zero-stage 3")
    assert approximate == pytest.approx(plain, rel=1e-5)


def started_sharded(arguments: str) -> tuple[float, None]:
    engine, task = layouts.build(arguments)
    return layouts.loss_of_step(engine, task, 0), None


def test_the_start_and_its_gradients_are_pefts() -> None:
    peft: Any = pytest.importorskip("peft")
    with in_float64():
        model = lora.their_model(NAME)
        adapters = list(lora.adapted_modules(model, [t for t in TARGETS.split() if t != "embed_tokens"], {}, {}))
        weights = to_ours({n: p.detach().clone() for n, p in model.named_parameters()}, CASES[NAME]().arguments)
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=lora.RANK, lora_alpha=lora.ALPHA, init_lora_weights="pissa",
                target_modules=[each.name.split(".")[-1] for each in adapters],
            ),
            autocast_adapter_dtype=False,
        )  # fmt: skip
        inputs, labels = lora.sample()
        logits = adapted(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        gradients: dict[str, Any] = {}
        for each in adapters:
            matrices = lora._matrices(adapted.get_submodule(f"base_model.model.{each.name}"))
            gradients |= {name: matrix.grad.numpy() for name, matrix in zip(each.ours, matrices, strict=True)}
            for name, matrix in zip(each.ours, matrices, strict=True):
                weights[name] = weights[name.replace("lora_", "lora_start_")] = matrix.detach()
    theirs = lora.Reference(
        {name: tensor.numpy() for name, tensor in weights.items()},
        inputs.numpy(),
        labels.numpy(),
        lora.Outputs(logits.detach().transpose(0, 1).numpy(), float(loss.detach()), gradients),
    )
    arguments = lora.lora(NAME, TARGETS.replace("embed_tokens", ""), "--lora-init pissa")
    lora.assert_equal(lora.outputs(theirs, arguments), theirs)
