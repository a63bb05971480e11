"""Chosen tokens: against transformers' processors, formulas by hand, and the exact distribution of every filter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from megatron.generation.options import GenerationOptions
from megatron.generation.sampling import Penalties, TokenSampler, exponentials, filter_logits

V = 300
EOS = (7, 11)


def logits(rows: int, size: int = V, seed: int = 0) -> Tensor:
    return 4 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def sampler(size: int = V, **options: Any) -> TokenSampler:
    return TokenSampler(GenerationOptions(**options), size, EOS)


def begin(chosen: TokenSampler, prompts: list[list[int]], first_request: int = 0) -> TokenSampler:
    keys = [(first_request + place, 0) for place in range(len(prompts))]
    chosen.add(range(len(prompts)), keys, prompts)
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Definitions


def by_hand(options: GenerationOptions, row: list[float], prompt: list[int], text: list[int]) -> list[float]:
    """Probabilities of the next token by loops over ids, in float64."""
    scores = list(row)
    for token, bias in options.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        if token in prompt or token in text:
            penalty = options.repetition_penalty
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        count = text.count(token)
        scores[token] -= count * options.frequency_penalty + (count > 0) * options.presence_penalty
    if len(text) < options.min_new_tokens:
        for token in EOS:
            scores[token] = -math.inf
    scores = [score / options.temperature for score in scores]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = set(order[: options.top_k] if options.top_k else order)

    def probs() -> dict[int, float]:
        weights = {token: math.exp(scores[token] - scores[order[0]]) for token in kept}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    if options.top_p < 1:
        before, nucleus, present = 0.0, set(), probs()
        for token in order:
            if token in kept and before < options.top_p:
                nucleus.add(token)
                before += present[token]
        kept = nucleus
    present = probs()
    kept = {token for token, prob in present.items() if prob >= options.min_p * max(present.values())}
    present = probs()
    return [present.get(token, 0.0) for token in range(len(scores))]


CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.04, "temperature": 1.4},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 4},
    {"logit_bias": ((3, 6.0), (7, -4.0)), "repetition_penalty": 0.8, "top_k": 40},
    {"frequency_penalty": 0.9, "presence_penalty": -0.6},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.9, "min_new_tokens": 3},
]
PROMPTS = [[3, 3, 9], [5], [7, 200, 3]]
TEXTS = [[1, 1, 3], [2, 8, 2], [7, 11, 5]]


def processed(options: GenerationOptions, rows: Tensor) -> Tensor:
    penalties = Penalties(options, V, EOS)
    penalties.add(range(len(rows)), PROMPTS, rows.device)
    for ids in zip(*TEXTS, strict=True):
        penalties.extend(torch.tensor(ids), range(len(rows)))
    scores = rows.clone()
    penalties.apply(scores, range(len(rows)))
    filter_logits(scores, options)
    return scores


@pytest.mark.parametrize("given", CASES, ids=str)
def test_probabilities_follow_the_definitions(given: dict[str, Any]) -> None:
    options = GenerationOptions(**{"temperature": 1.0, **given})
    rows = logits(3)
    found = processed(options, rows).softmax(dim=1)
    expected = [by_hand(options, *row) for row in zip(rows.double().tolist(), PROMPTS, TEXTS, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-4)
    assert torch.equal(found > 0, torch.tensor(expected) > 0)


@pytest.mark.parametrize("given", [case for case in CASES if "frequency_penalty" not in case], ids=str)
def test_processors_and_their_order_are_those_of_transformers(given: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    options = GenerationOptions(**{"temperature": 1.0, **given})
    config = transformers.GenerationConfig(
        do_sample=True,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p or None,
        repetition_penalty=options.repetition_penalty,
        min_new_tokens=options.min_new_tokens or None,
        sequence_bias=[[[token], bias] for token, bias in options.logit_bias] or None,
        eos_token_id=list(EOS),
    )
    rows = logits(3)
    tiny = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(tiny)
    found = processed(options, rows)
    for row in range(3):  # their prompts would be padded to one length, and the padding be penalised
        config._eos_token_tensor = torch.tensor(EOS)
        theirs = model._get_logits_processor(config, input_ids_seq_length=len(PROMPTS[row]), device="cpu")
        ids = torch.tensor([PROMPTS[row] + TEXTS[row]])
        torch.testing.assert_close(found[row : row + 1], theirs(ids, rows[row : row + 1].clone()))


def test_equally_probable_tokens_are_kept_or_dropped_together() -> None:
    for given in ({"top_k": 2}, {"top_p": 0.5}):
        scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, -5.0]])
        filter_logits(scores, GenerationOptions(temperature=1.0, **given))
        assert scores.isfinite().tolist() == [[True, True, True, True, False]]


def test_a_nucleus_beyond_the_most_likely_tokens_is_found() -> None:
    scores = logits(2, 5000) / 40  # nearly uniform
    expected = scores.softmax(dim=1).sort(dim=1, descending=True).values.cumsum(dim=1).lt(0.75).sum(dim=1) + 1
    filter_logits(scores, GenerationOptions(temperature=1.0, top_p=0.75))
    assert expected.min() > 1024
    assert torch.equal(scores.isfinite().sum(dim=1), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Draws


@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": ((2, 1.5),)}],
    ids=str,
)
def test_frequencies_are_the_probabilities(given: dict[str, Any]) -> None:
    draws, size = 50_000, 23
    options = GenerationOptions(**{"temperature": 1.0, **given})
    row = logits(1, size, seed=3) / 3
    chosen = begin(TokenSampler(options, size, ()), [[0]] * draws).choose(row.expand(draws, -1), range(draws))
    penalties = Penalties(options, size, ())
    scores = row.clone()
    penalties.apply(scores, [0])
    filter_logits(scores, options)
    expected = draws * scores.softmax(dim=1)[0].double()
    counts = chosen.ids_B.bincount(minlength=size).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # about one in 10,000 by chance; the seed is fixed
    assert chi_square > freedom - 4 * math.sqrt(2 * freedom)


def test_places_samples_and_requests_draw_apart() -> None:
    keys = [
        (seed, request, sample, place) for seed in (0, 1) for request in (0, 1) for sample in (0, 1) for place in (0, 1)
    ]
    rows = exponentials(keys, 2000)
    correlations = torch.corrcoef(rows) - torch.eye(len(keys))
    assert correlations.abs().max() < 0.1
    assert torch.equal(exponentials(keys[3:4], 2000), rows[3:4])


def test_a_text_depends_on_its_key_alone() -> None:
    """The same ids for a request in any row of any batch, whatever runs beside it and when it began."""

    def model(text: list[int]) -> Tensor:
        return logits(1, seed=hash(tuple(text)) % 2**31)[0]

    options = GenerationOptions(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=5)
    prompts = [[4], [9, 9], [1, 2, 3]]

    def alone(request: int) -> list[int]:
        chosen = TokenSampler(options, V, EOS)
        chosen.add([0], [(request, 0)], [prompts[request]])
        text: list[int] = []
        for _ in range(12):
            text.append(int(chosen.choose(model(prompts[request] + text)[None], [0]).ids_B))
        return text

    together = TokenSampler(options, V, EOS)
    texts: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    for step in range(20):
        for request, start, row in ((0, 0, 3), (1, 5, 1), (2, 7, 0)):
            if step == start:
                together.add([row], [(request, 0)], [prompts[request]])
                texts[request], rows[row] = [], request
        batch = torch.stack(
            [model(prompts[rows[row]] + texts[rows[row]]) if row in rows else logits(1)[0] for row in range(4)]
        )
        for row, token in enumerate(together.choose(batch, range(len(batch))).ids_B.tolist()):
            if row in rows:
                texts[rows[row]].append(token)
        for row in [row for row, request in rows.items() if len(texts[request]) == 12]:
            together.remove([row])
            del rows[row]
    assert texts == {request: alone(request) for request in range(3)}


# ---------------------------------------------------------------------------------------------------------------------
# Greedy choice, log-probabilities, options


def test_the_greedy_choice_needs_no_more_than_the_largest_logit() -> None:
    chosen = begin(sampler(), PROMPTS)
    rows = logits(3)
    assert not chosen.needs_logits
    assert torch.equal(chosen.choose(rows, range(len(rows))).ids_B, rows.argmax(dim=1))
    for given in ({"temperature": 1.0}, {"logprobs": 0}, {"repetition_penalty": 2.0}, {"min_new_tokens": 1}):
        assert sampler(**given).needs_logits


def test_an_end_of_text_token_waits_for_the_minimum() -> None:
    chosen = begin(sampler(min_new_tokens=2, stop_token_ids=(20,)), [[1]])
    row = torch.zeros(1, V)
    row[0, [7, 11, 20, 30]] = torch.tensor([5.0, 4.0, 3.0, 2.0])
    assert [int(chosen.choose(row, [0]).ids_B) for _ in range(3)] == [30, 30, 7]
    ignoring = begin(sampler(min_new_tokens=2, stop_token_ids=(20,), ignore_eos=True), [[1]])
    assert int(ignoring.choose(row, [0]).ids_B) == 7


def test_log_probabilities_are_those_of_the_model() -> None:
    rows = logits(3)
    chosen = begin(sampler(temperature=2.0, top_k=3, logit_bias=((5, 3.0),), logprobs=4), PROMPTS).choose(
        rows, range(len(rows))
    )
    expected = rows.double().log_softmax(dim=1)
    assert chosen.logprobs_B is not None
    assert chosen.alternatives is not None
    torch.testing.assert_close(chosen.logprobs_B, expected.gather(1, chosen.ids_B[:, None])[:, 0].float())
    values, ids = expected.topk(4, dim=1)
    assert torch.equal(chosen.alternatives.ids_BK, ids)
    torch.testing.assert_close(chosen.alternatives.logprobs_BK, values.float())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"top_p": 0.9}, "top_p=0.9 has no effect on the most probable token"),
        ({"num_samples": 2}, "num_samples=2 has no effect"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is above max_new_tokens=8"),
        ({"stop": ("a", "")}, "empty string"),
        ({"num_beams": 2, "temperature": 0.5}, "leave one of them out"),
        ({"num_beams": 2, "num_samples": 3}, "num_samples=3 is above num_beams=2"),
        ({"length_penalty": 2.0}, "is for a beam search"),
    ],
)
def test_contradictions_are_named(given: dict[str, Any], words: str) -> None:
    assert any(words in fault for fault in GenerationOptions(**given).faults())


@pytest.mark.parametrize("given", [{"top_p": 0}, {"min_p": 1}, {"temperature": math.inf}, {"frequency_penalty": 3}])
def test_values_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerationOptions(**given)


def test_default_options_have_no_fault() -> None:
    assert list(GenerationOptions().faults()) == []
    assert dataclasses.asdict(GenerationOptions())["seed"] == 0
