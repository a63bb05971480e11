"""Generated texts are those of transformers' `generate`, on every layout, whatever else is in the batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megatron.generation import passes
from megatron.generation.generator import generate
from megatron.generation.model import InferenceModel, build_stage
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Completion, Request
from megatron.models.transformer import TransformerLayer
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.parallel.operators.nf4 import quantized_weights
from megatron.parallel.shards import named_parameters, shard_of
from tests.generation.outputs import LAYOUT, completions, inference_model
from tests.models.outputs import Array, config_of
from tests.models.test_hf_logits import CASES, VOCABULARY, to_ours
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

LENGTHS = (5, 58, 1, 17, 70)
"""With NUM_NEW more, one grows beyond 64 places, the unit in which a cache is read."""
NUM_NEW = 16
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


def arguments_of(name: str) -> str:
    return CASES[name]().arguments.replace("--max-position-embeddings 40", f"--max-position-embeddings {POSITIONS}")


@cache
def their_model(name: str) -> Any:
    config = CASES[name]().theirs().config
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
    return model


@cache
def reference(name: str) -> Reference:
    arguments, model = arguments_of(name), their_model(name)
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = [greedy(model, prompt) for prompt in prompts]
    weights = to_ours({each: p.detach() for each, p in model.named_parameters()}, arguments)
    arrays = {each: tensor.numpy() for each, tensor in weights.items()}
    options = {"max_new_tokens": NUM_NEW, **OPTIONS.get(model.config.model_type, {})}
    return Reference(arguments, arrays, prompts, texts, options)


def greedy(model: Any, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": num_new, "do_sample": False, **OPTIONS.get(model.config.model_type, {})}
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
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


class OwnLayer(TransformerLayer):
    """A family's own, which may read all tokens behind its attention."""


@pytest.mark.parametrize("is_own", [False, True])
def test_the_last_layer_drops_tokens_of_prompts_unless_it_is_a_familys_own(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "CHUNK", 32)
    theirs = reference("llama_gqa")
    model = inference_model(theirs.arguments, theirs.weights, is_alone=True)
    first, last = [each for each in model.module.modules() if isinstance(each, TransformerLayer)]
    if is_own:
        last.drops_unwanted, last.__class__ = False, OwnLayer
        model = InferenceModel(model.config, model.ctx, model._layers, model.module)
    computed = [list[int](), list[int]()]
    for layer, counts in zip((first, last), computed, strict=True):
        layer.mlp.register_forward_pre_hook(lambda _, given, own=counts: own.append(given[0].shape[:2].numel()))
    prompts = theirs.prompts[1:2] * 3
    requests = [Request(number, tuple(prompt)) for number, prompt in enumerate(prompts)]
    found = list(generate(model, requests, GenerationOptions(max_new_tokens=2)))
    assert ids_of(found) == [theirs.texts[1][:2]] * 3
    # 58 tokens in two chunks, then one; the first chunk ends no prompt, and one token stands for none
    every = [3 * 32, 3 * 26, 3]
    assert computed == [every, every if is_own else [1, 3, 3]]


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("llama_3.1", 4, (4, 1)),  # 2 key/value heads on 4 ranks
        ("bloom_12_heads", 4, (2, 2)),
        pytest.param("gpt2", 2, (1, 2), marks=pytest.mark.slow),
        pytest.param("llama_gqa", 2, (1, 1), marks=pytest.mark.slow),
    ],
)
def test_ranks_generate_the_same(ranks: RankPools, name: str, world: int, layout: tuple[int, int]) -> None:
    theirs = reference(name)
    arguments = f"{theirs.arguments} {LAYOUT.format(*layout)}"
    results = ranks(world)(completions, arguments, theirs.weights, theirs.prompts, theirs.options, 3)
    assert ids_of(results[0]) == theirs.texts
    assert results[1:] == [[]] * (world - 1)


FORMS = {
    "bf16": "--bf16",
    "nf4": "--lora-rank 4 --lora-alpha 8 --lora-target-modules all-linear --quantize-base nf4 --ffn-hidden-size 128",
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_the_most_probable_ones_without_a_cache(form: str) -> None:
    """In 16 bits two logits may be as close as their rounding."""
    theirs = reference("llama_gqa")
    arguments = f"{theirs.arguments} {FORMS[form]}"
    generator = torch.Generator().manual_seed(9)
    weights = theirs.weights | {
        name: torch.empty(shape).normal_(0, 0.1, generator=generator).numpy()
        for name, shape in full_shapes(arguments)
        if name not in theirs.weights or theirs.weights[name].shape != shape
    }
    assert ("lora" in FORMS[form]) == (len(weights) > len(theirs.weights))
    found = completions(arguments, weights, theirs.prompts, {"max_new_tokens": NUM_NEW}, 3, is_alone=True)
    model = inference_model(arguments, weights, is_alone=True)
    for prompt, each in zip(theirs.prompts, found, strict=True):
        tokens = torch.tensor([[*prompt, *each.ids]])
        logits = model.logits(model.forward_stage(tokens))[len(prompt) - 1 : -1, 0].float()
        chosen = logits.gather(1, torch.tensor(each.ids)[:, None])[:, 0]
        assert logits.std() > 0.3
        tolerance = 0.02 * logits.abs().max() if form == "bf16" else 1e-4
        assert (logits.amax(1) - chosen).max() <= tolerance


def full_shapes(arguments: str) -> list[tuple[str, tuple[int, ...]]]:
    _, modules = build_stage(config_of(arguments), ParallelContext.single(), torch.device("cpu"))
    found = [(name, shard_of(parameter).shape) for name, parameter in named_parameters(modules)]
    return found + [(name, weight.shard.shape) for name, weight in quantized_weights(modules)]


DRAWN = {
    "max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "num_samples": 3, "logprobs": 2, "seed": 5,
    "frequency_penalty": 1.5, "repetition_penalty": 1.2,
}  # fmt: skip
"""What is counted must be the text's own, not that of the row's text before."""
BEAMS = {"max_new_tokens": 9, "num_beams": 2, "num_samples": 2}


@cache
def alone(name: str, kind: str) -> list[Completion]:
    theirs = reference(name)
    options = DRAWN if kind == "drawn" else BEAMS
    return completions(
        theirs.arguments, theirs.weights, theirs.prompts, options, 16, theirs.texts[0][:1], is_alone=True
    )


def assert_same(ours: list[Completion], expected: list[Completion]) -> None:
    """Ids and reasons; log-probabilities and scores within what sums in another order change."""
    assert [each[:4] for each in map(fields_of, ours)] == [each[:4] for each in map(fields_of, expected)]
    for one, other in zip(ours, expected, strict=True):
        assert (one.score is None) == (other.score is None)
        if one.score is not None:
            assert one.score == pytest.approx(other.score, abs=1e-5)
        if one.logprobs is not None:
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert [[token for token, _ in each] for each in one.alternatives or ()] == [
                [token for token, _ in each] for each in other.alternatives or ()
            ]


def fields_of(completion: Completion) -> tuple[Any, ...]:
    return completion.request, completion.sample, completion.ids, completion.reason


@pytest.mark.parametrize("kind", ["drawn", "beams"])
def test_the_batch_changes_nothing(kind: str) -> None:
    theirs = reference("llama_gqa")
    expected = alone("llama_gqa", kind)
    options = DRAWN if kind == "drawn" else BEAMS
    assert len(expected) == len(LENGTHS) * options["num_samples"]
    assert len({each.ids for each in expected}) > len(LENGTHS) - 1
    # two rows: three samples of a prompt are generated in parts
    ours = completions(theirs.arguments, theirs.weights, theirs.prompts, options, 2, theirs.texts[0][:1], is_alone=True)
    assert_same(ours, expected)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_each_of_several_final_ids_ends_a_text(num_beams: int) -> None:
    theirs, model = reference("llama_gqa"), their_model("llama_gqa")
    # each of two prompts meets another one of them; the first of the ids occurs nowhere
    unused = next(token for token in range(VOCABULARY) if not any(token in text for text in theirs.texts))
    eos = [unused, theirs.texts[0][3], theirs.texts[1][2]]
    options = {"max_new_tokens": NUM_NEW, "num_beams": num_beams}
    ours = completions(theirs.arguments, theirs.weights, theirs.prompts, options, 4, eos, is_alone=True)
    assert len({each.ids[-1] for each in ours if each.reason == "stop"} & set(eos)) == 2
    for prompt, each in zip(theirs.prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=eos, **options)
        assert list(each.ids) == text[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "world", "layout"), [("drawn", 2, (1, 2)), ("drawn", 4, (2, 1)), ("beams", 4, (2, 2))]
)
def test_samples_and_beams_are_the_same_on_ranks(
    ranks: RankPools, kind: str, world: int, layout: tuple[int, int]
) -> None:
    theirs = reference("llama_gqa")
    arguments = f"{theirs.arguments} {LAYOUT.format(*layout)}"
    options = DRAWN if kind == "drawn" else BEAMS
    results = ranks(world)(completions, arguments, theirs.weights, theirs.prompts, options, 5, theirs.texts[0][:1])
    assert_same(results[0], alone("llama_gqa", kind))


def test_beams_are_those_of_transformers() -> None:
    theirs = reference("llama_gqa")
    model = their_model("llama_gqa")
    options = {name: value for name, value in BEAMS.items() if name != "num_samples"}
    all_texts = alone("llama_gqa", "beams")
    found_by_prompt = [all_texts[place : place + 2] for place in range(0, len(all_texts), 2)]
    for prompt, ours in zip(theirs.prompts, found_by_prompt, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=theirs.texts[0][0],
            num_return_sequences=2,
            **options,
        )
        for sample, (one, text) in enumerate(zip(ours, found[:, len(prompt) :].tolist(), strict=True)):
            assert one.sample == sample
            assert [*one.ids, *[0] * (len(text) - len(one.ids))] == text  # filled up


@pytest.mark.parametrize(
    ("prompts", "options", "batch_size", "expected"),
    [
        ([[1], []], {}, 4, "prompt 11 has no tokens"),
        ([[1, 123]], {}, 4, "prompt 10 has the id 123, but the model's vocabulary has the ids 0 to 122"),
        ([[1], [1] * (POSITIONS + 1)], {}, 4, f"prompt 11 needs {POSITIONS + 1} positions, but the model has"),
        ([[1]], {"num_beams": 4}, 2, "batch_size=2 is too small for num_beams=4"),
    ],
)
def test_wrong_requests_are_named_before_anything_runs(
    prompts: list[list[int]], options: dict[str, Any], batch_size: int, expected: str
) -> None:
    theirs = reference("gpt2")
    with pytest.raises(ConfigError, match=re.escape(expected)):
        completions(theirs.arguments, theirs.weights, prompts, options, batch_size, is_alone=True)


def test_a_text_ends_with_the_learned_positions() -> None:
    theirs = reference("gpt2")
    prompts = [[5] * POSITIONS, [7] * (POSITIONS - 3)]
    found = completions(theirs.arguments, theirs.weights, prompts, {"max_new_tokens": 64}, is_alone=True)
    assert [len(each.ids) for each in found] == [1, 4]
    assert {each.reason for each in found} == {"length"}


def test_a_batch_that_does_not_fit_is_refused_with_the_size_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = reference("llama_gqa")
    one = 2 * 2 * (2 * 8) * 128 * 4  # layers, keys and values, heads x size, places, bytes
    monkeypatch.setattr("megatron.generation.generator.free_memory_bytes", lambda: 4 * one - 1)
    needed = r"a batch of 5 texts of up to 86 tokens needs 0.00 GB .* set batch_size to 3 or less"
    with pytest.raises(ConfigError, match=needed):
        completions(theirs.arguments, theirs.weights, theirs.prompts, theirs.options, is_alone=True)
    assert completions(theirs.arguments, theirs.weights, theirs.prompts, theirs.options, 3, is_alone=True)
