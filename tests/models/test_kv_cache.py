"""Logits of prompts in chunks and of one token at a time over a cache, by those of whole sequences without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.models.attention.kv_cache import DecodeStep, KVCache, PrefillChunk
from megatron.models.attention.layer import SelfAttention
from megatron.models.sequential import SequentialModel
from megatron.models.transformer import TransformerLayer
from megatron.parallel.context import ParallelContext
from megatron.parallel.losses import gather_logits
from megatron.parallel.shards import named_parameters
from tests.models.outputs import build_model, config_of, logits_of

CTX = ParallelContext.single()
LENGTHS, CHUNK, NUM_NEW = (3, 20, 9), 8, 6
LEARNED = "--architecture bloom --position-embedding-type learned --max-position-embeddings 26"
ALIBI = "--architecture bloom --position-embedding-type alibi --num-attention-heads 12 --hidden-size 96"
LLAMA = "--architecture llama --position-embedding-type rope --num-query-groups 2"
SCALED = f"{LLAMA} --rotary-base 500000 --rope-scaling-factor 8 --rope-scaling-original-length 8"
NEOX = "--architecture gpt_neox --position-embedding-type rope"
FALCON = "--architecture falcon --position-embedding-type rope --shared-norm"
OLMO2 = "--architecture olmo2 --position-embedding-type rope"
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --ffn-hidden-size 96".replace("llama", "mixtral")
ADAPTED = f"{LLAMA} --lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear"


def model_of(arguments: str) -> SequentialModel:
    model = build_model(config_of(arguments), CTX).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in named_parameters(model):
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    return model


def logits_of_outputs(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return gather_logits(outputs[0], outputs[1], CTX)


def cached_logits(model: SequentialModel, tokens: Tensor, cache: KVCache) -> list[Tensor]:
    """Logits of all places of three sequences in rows 3, 1 and 2, the last NUM_NEW of each one token at a time."""
    rows = torch.tensor([3, 1, 2])
    found = [torch.zeros(length + NUM_NEW, 123) for length in LENGTHS]
    for begin in range(0, max(LENGTHS), CHUNK):
        rest = [index for index, length in enumerate(LENGTHS) if length > begin]
        ids = torch.zeros(len(rest), CHUNK, dtype=torch.int64)
        for place, index in enumerate(rest):
            part = tokens[index, begin : min(begin + CHUNK, LENGTHS[index])]
            ids[place, : len(part)] = part
        chunk = PrefillChunk(cache, rows[rest], torch.tensor([LENGTHS[index] for index in rest]), begin, CHUNK)
        logits = model((ids, chunk), project=logits_of_outputs)
        for place, index in enumerate(rest):
            end = min(begin + CHUNK, LENGTHS[index])
            found[index][begin:end] = logits[: end - begin, place]
    for step in range(NUM_NEW):
        places = [0, LENGTHS[1] + step, LENGTHS[2] + step, LENGTHS[0] + step]  # row 0 is not in use
        ids = torch.tensor([[0], [tokens[1, places[1]]], [tokens[2, places[2]]], [tokens[0, places[3]]]])
        pass_ = DecodeStep(cache, 0, torch.tensor(places), 64)
        logits = model((ids, pass_), project=logits_of_outputs)[0]
        for index, row in enumerate((3, 1, 2)):
            found[index][places[row]] = logits[row]
    return found


@pytest.mark.parametrize("arguments", [LEARNED, ALIBI, LLAMA, SCALED, ADAPTED], ids=lambda text: text[15:60])
def test_logits_equal_those_without_a_cache(arguments: str) -> None:
    model = model_of(arguments)
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    tokens = torch.randint(123, (3, max(LENGTHS) + NUM_NEW), generator=torch.Generator().manual_seed(5))
    cache = KVCache(layers, 5, 30, torch.float32, CTX.device)
    with torch.no_grad():
        for _ in range(2):  # the second time over rows that were used
            for index, logits in enumerate(cached_logits(model, tokens, cache)):
                whole = logits_of(model, tokens[index : index + 1, : len(logits)], CTX)[:, 0]
                assert whole.std() > 0.3
                torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "arguments", [LEARNED, LLAMA, NEOX, FALCON, OLMO2, MIXTRAL, ADAPTED], ids=lambda text: text[15:60]
)
def test_the_last_layer_computes_wanted_tokens_alone(arguments: str) -> None:
    model = model_of(arguments)
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    layers[-1].drops_unwanted = True
    shapes: list[list[tuple[int, ...]]] = []
    for layer in layers:
        shapes.append([])
        layer.mlp.register_forward_pre_hook(lambda _, given, own=shapes[-1]: own.append(tuple(given[0].shape[:2])))
    tokens = torch.randint(123, (3, 9), generator=torch.Generator().manual_seed(5))
    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    cache = KVCache(attentions, 5, 30, torch.float32, CTX.device)
    # in another order than that of the rows, two of one row, and none of row 1
    ends = [(2, 5), (0, 7), (0, 2)]
    with torch.no_grad():
        chunk = PrefillChunk(cache, torch.tensor([3, 1, 2]), torch.tensor([8, 8, 8]), 0, 8, ends)
        logits = model((tokens[:, :8], chunk), project=logits_of_outputs)
        # keys and values of all tokens are there
        step = DecodeStep(cache, 1, torch.tensor([8, 8, 8]), 64)
        after = model((tokens[[1, 2, 0], 8:], step), project=logits_of_outputs)
        whole = logits_of(model, tokens, CTX)
    assert shapes == [[(8, 3), (1, 3), (9, 3)], [(1, 3), (1, 3), (9, 3)]]
    assert logits.shape == (1, 3, 123)
    expected = torch.stack([whole[place, index] for index, place in ends])
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(after[0], whole[8, [1, 2, 0]], rtol=0, atol=1e-5)
    assert expected.std(0).mean() > 0.3, "an exchanged row would not be seen"


def test_rows_are_copied_up_to_a_length() -> None:
    model = model_of(LLAMA)
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    cache = KVCache(layers, 3, 130, torch.float32, CTX.device)
    assert cache.length == 192
    assert cache.num_bytes == 2 * len(layers) * 3 * 2 * 192 * 8 * 4
    for part in cache.of(layers[1]):
        part.copy_(torch.arange(3)[:, None, None, None])
    cache.copy_rows(torch.tensor([2, 0]), torch.tensor([0, 1]), 70)  # row 0 is read before it is written
    for part in cache.of(layers[1]):
        assert part[:, 0, 127, 0].tolist() == [2, 0, 2]
        assert part[:, 0, 128, 0].tolist() == [0, 1, 2]
