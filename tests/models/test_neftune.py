"""NEFTune's noise: drawn as declared, alike on every layout, added where and as largely as transformers adds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.models import embedding
from megatron.models.embedding import add_noise
from megatron.models.positions import Packing
from megatron.parallel.context import ParallelContext
from megatron.parallel.rng import derive_seed
from tests.models.noise import expected_noise, our_noise
from tests.models.outputs import Array, build_model, config_of, logits_of
from tests.models.test_transformer import LENGTHS, MODELS, SINGLE, packed_inputs, tokens_of

KEY = derive_seed(1, 2)


def noise_of(tokens: Tensor, packing: Packing | None, size: int, ctx: ParallelContext, alpha: float = 5.0) -> Array:
    ctx.state.streams.step_key = KEY
    rows = tokens.shape[1] // (ctx.tensor_size if ctx.sequence_parallel else 1)
    return add_noise(torch.zeros(rows, len(tokens), size), tokens, packing, alpha, ctx).numpy()


@pytest.mark.parametrize("chunk", [8, 2**22])
def test_noise_of_packed_sequences_is_that_of_each_alone(chunk: int) -> None:
    tokens, positions, starts = packed_inputs(tokens_of(2, 24))
    with patch.object(embedding, "CHUNK_NUMBERS", chunk):
        found = noise_of(tokens, Packing(positions, starts), 16, ParallelContext.single())
    for sample, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for begin, end in zip(ends - lengths, ends, strict=True):
            expected = expected_noise(tokens[sample, begin:end].numpy(), KEY, 16, 5.0)
            np.testing.assert_allclose(found[begin:end, sample], expected, rtol=1e-6)


def test_sequence_parallel_ranks_draw_their_own_rows() -> None:
    tokens = tokens_of(2, 24)
    whole = noise_of(tokens, None, 16, ParallelContext.single())
    for rank in range(2):
        ctx = replace(ParallelContext.single(), tensor_size=2, rank=rank, sequence_parallel=True)
        np.testing.assert_array_equal(noise_of(tokens, None, 16, ctx), whole[12 * rank : 12 * rank + 12])


def test_noise_is_uniform_and_uncorrelated() -> None:
    """Over 2M numbers of equal tokens, the hardest case: mean, chi-square of 64 bins, neighbours in each direction."""
    alpha, (places, rows, size) = 5.0, (512, 8, 512)
    tokens = torch.arange(rows).unsqueeze(1).repeat(1, places)
    unit = noise_of(tokens, None, size, ParallelContext.single(), alpha).astype(np.float64)
    unit *= np.sqrt(places * size) / alpha
    assert 0.999 < np.abs(unit).max() <= 1
    assert abs(unit.mean()) < 4 / np.sqrt(3 * unit.size)
    counts = np.histogram(unit, bins=64, range=(-1, 1))[0]
    chi_square = ((counts - unit.size / 64) ** 2).sum() / (unit.size / 64)
    assert 24 < chi_square < 123  # 63 degrees of freedom, six deviations
    for axis in range(3):
        there = np.moveaxis(unit, axis, 0)
        assert abs((there[1:] * there[:-1]).mean()) < 5 / (3 * np.sqrt(there[1:].size)), axis


@pytest.mark.parametrize("name", MODELS)
def test_only_training_is_noisy(name: str) -> None:
    tokens = tokens_of(2, 24)
    plain = build_model(config_of(f"{MODELS[name]} --init-method-std 0.1"), SINGLE)
    noisy = build_model(config_of(f"{MODELS[name]} --init-method-std 0.1 --neftune-noise-alpha 5"), SINGLE)
    assert not torch.equal(logits_of(noisy, tokens, SINGLE), logits_of(plain, tokens, SINGLE))
    noisy.eval()
    torch.testing.assert_close(logits_of(noisy, tokens, SINGLE), logits_of(plain, tokens, SINGLE), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bloom_8_heads", "llama_gqa_tied_wide_heads"])
def test_noise_enters_where_and_as_large_as_in_transformers(name: str) -> None:
    """transformers' own hook, whose uniform_ takes our numbers between its bounds."""
    pytest.importorskip("transformers")
    from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours

    integration: Any = pytest.importorskip("transformers.integrations.neftune")
    case = CASES[name]()
    theirs = case.theirs().train()
    integration.activate_neftune(theirs, 5.0)
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))

    with torch.no_grad(), patch.object(Tensor, "uniform_", our_noise(tokens)):
        expected = theirs(tokens, use_cache=False).logits
        without = theirs.eval()(tokens, use_cache=False).logits
    weights = to_ours({key: p.detach() for key, p in theirs.named_parameters()}, case.arguments)
    arrays = {key: tensor.numpy() for key, tensor in weights.items()}
    ctx = ParallelContext.single()
    ours = logits_of(build_model(config_of(f"{case.arguments} --neftune-noise-alpha 5"), ctx, arrays), tokens, ctx)
    torch.testing.assert_close(ours.transpose(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - without).abs().max() > 1e-2
