"""Texts are transformers' over every cut of the layers into pipeline stages, also where a stage is the head alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.plan.flops import declared_layers
from tests.generation.outputs import completions_of_cuts
from tests.models.outputs import config_of
from tests.models.test_hf_logits import VOCABULARY, to_ours
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, HEADS = 3, 32, 4
PROMPTS = (1, 23, 530, 600, 40)
"""Their lengths: two are read in two chunks, one pass each of both."""
NUM_NEW = 5
SIZES = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length 1024"


def llama() -> tuple[Any, str]:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-6,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    arguments = "--architecture llama --position-embedding-type rope --num-query-groups 2 --norm-epsilon 1e-6"
    return config, f"{SIZES} {arguments} --ffn-hidden-size 48 --untie-embeddings-and-output-weights"


def gpt2() -> tuple[Any, str]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=1024, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    arguments = "--architecture bloom --position-embedding-type learned --max-position-embeddings 1024"
    return config, f"{SIZES} {arguments}"


MODELS = {"llama, untied": llama, "gpt2, tied": gpt2}


def legal_cuts(arguments: str, num_stages: int) -> list[list[int]]:
    """Each stage has a transformer layer or the output projection."""
    layers = declared_layers(config_of(arguments))
    holds = [layer.number is not None or layer is layers[-1] for layer in layers]
    cuts = ([0, *inner, len(layers)] for inner in itertools.combinations(range(1, len(layers)), num_stages - 1))
    return [cut for cut in cuts if all(any(holds[a:b]) for a, b in itertools.pairwise(cut))]


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), LAYERS])
@pytest.mark.parametrize("name", MODELS)
def test_texts_of_every_cut_are_those_of_transformers(ranks: RankPools, name: str, num_stages: int) -> None:
    config, arguments = MODELS[name]()
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # a model that repeats itself would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() == 2 else 0.1)
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
        expected.append(text[0, len(prompt) :].tolist())
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    assert all(len(set(text)) > 2 for text in expected)
    weights = to_ours({each: p.detach() for each, p in model.named_parameters()}, arguments)
    arrays = {each: tensor.numpy() for each, tensor in weights.items()}
    cuts = legal_cuts(arguments, num_stages)
    assert any(cut[-2] == cut[-1] - 1 for cut in cuts)  # the last stage is the output projection alone
    found = ranks(num_stages)(
        completions_of_cuts, arguments, num_stages, cuts, arrays, prompts, {"max_new_tokens": NUM_NEW}
    )
    assert dict(zip(map(str, cuts), found[0], strict=True)) == {str(cut): expected for cut in cuts}
