"""Generated texts are those of transformers' `generate`, on every layout, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megatron.generation.requests import Completion
from tests.generation.outputs import LAYOUT, completions
from tests.models.outputs import Array
from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

LENGTHS = (5, 30, 1, 17, 70)
NUM_NEW = 48
POSITIONS = 320
OPTIONS = {"bloom": {"repetition_penalty": 3.0}}
"""Such a small Bloom repeats its last token otherwise, whatever the prompt."""


@dataclass(frozen=True)
class Reference:
    arguments: str
    weights: dict[str, Array]
    prompts: list[list[int]]
    texts: list[list[int]]
    """Greedy, of each prompt alone."""
    options: dict[str, Any]


@cache
def reference(name: str) -> Reference:
    case = CASES[name]()
    arguments = case.arguments.replace("--max-position-embeddings 40", f"--max-position-embeddings {POSITIONS}")
    config = case.theirs().config
    if name == "gpt2":
        config.n_positions = POSITIONS
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # large matrices, and a small embedding: a model that repeats itself would hide mistakes
            mean = 1.0 if parameter.dim() == 1 and parameter_name.endswith("weight") else 0.0
            mean = 0.1 if "embeddings_layernorm.weight" in parameter_name else mean
            is_inner = parameter.dim() == 2 and any(part in parameter_name for part in (".attn", ".mlp", "attention."))
            parameter.normal_(mean, 0.5 if is_inner else 0.1, generator=generator)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = [greedy(model, prompt) for prompt in prompts]
    weights = to_ours({each: p.detach() for each, p in model.named_parameters()}, arguments)
    arrays = {each: tensor.numpy() for each, tensor in weights.items()}
    options = {"max_new_tokens": NUM_NEW, **OPTIONS.get(config.model_type, {})}
    return Reference(arguments, arrays, prompts, texts, options)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, **OPTIONS.get(model.config.model_type, {})}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def ids_of(found: list[Completion]) -> list[list[int]]:
    return [list(each.ids) for each in found]


@pytest.mark.parametrize("name", ["gpt2", "bloom_12_heads", "llama_mha", "llama_3.1"])
def test_greedy_texts_are_those_of_transformers(name: str) -> None:
    theirs = reference(name)
    assert len({tuple(text) for text in theirs.texts}) == len(LENGTHS)
    assert all(len(set(text)) > 3 for text in theirs.texts)
    ours = completions(theirs.arguments, theirs.weights, theirs.prompts, theirs.options, 3, is_alone=True)
    assert ids_of(ours) == theirs.texts
    assert [each.request for each in ours] == [10, 11, 12, 13, 14]
    assert {each.reason for each in ours} == {"length"}


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("llama_3.1", 4, (4, 1)),  # 2 key/value heads on 4 ranks
        ("bloom_12_heads", 4, (2, 2)),
        ("gpt2", 2, (1, 2)),
        ("llama_gqa", 2, (1, 1)),
    ],
)
def test_ranks_generate_the_same(ranks: RankPools, name: str, world: int, layout: tuple[int, int]) -> None:
    theirs = reference(name)
    arguments = f"{theirs.arguments} {LAYOUT.format(*layout)}"
    results = ranks(world)(completions, arguments, theirs.weights, theirs.prompts, theirs.options, 3)
    assert ids_of(results[0]) == theirs.texts
    assert results[1:] == [[]] * (world - 1)
