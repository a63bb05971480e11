"""Beam search: against an enumeration of all texts, and against transformers' ids and scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.generation.chooser import BeamResult, BeamSearch, IsFinished
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Reason

Model = Callable[[list[int]], Tensor]
"""Logits of the next token."""


def search(
    options: GenerationOptions,
    model: Model,
    prompts: list[list[int]],
    eos: tuple[int, ...],
    is_finished: IsFinished = lambda *text: None,
) -> list[list[BeamResult]]:
    """Best texts of each prompt, in one batch. Each row's text is put together here, by the sources."""
    vocab_size = len(model([0]))
    beams, count = BeamSearch(options, vocab_size, eos, is_finished), options.num_beams
    texts: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        beams.add(number * count, prompt, number=number)
        texts |= {number * count + beam: prompt for beam in range(count)}
    results: dict[int, list[BeamResult]] = {}
    while len(results) < len(prompts):
        rows = list(range(len(prompts) * count))
        step = beams.choose(torch.stack([model(texts[row]) for row in rows]), rows)
        texts = {row: [*texts[step.sources[row]], int(step.ids_B[row])] for row in rows}
        for first, result in step.finished.items():
            results[first // count] = result
            beams.remove(first)
    return [results[number] for number in range(len(prompts))]


def toy(size: int) -> Model:
    """Logits that depend on the last two tokens."""
    table = torch.randn(size, size, size, generator=torch.Generator().manual_seed(4))
    return lambda ids: 2 * table[ids[-2] if len(ids) > 1 else 0, ids[-1]]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7])
def test_with_enough_beams_the_best_text_of_all_is_found(length_penalty: float) -> None:
    size, eos, longest, prompt = 4, 2, 3, [1]
    model = toy(size)
    scores = {}
    for length in range(1, longest + 1):
        for text in itertools.product(range(size), repeat=length):
            if eos in text[:-1] or (text[-1] != eos and length < longest):
                continue
            logprobs = [model([*prompt, *text[:i]]).double().log_softmax(0)[text[i]] for i in range(length)]
            scores[text] = float(sum(logprobs)) / length**length_penalty
    options = GenerationOptions(num_beams=100, max_new_tokens=longest, length_penalty=length_penalty)
    ((found,),) = search(options, model, [prompt], (eos,))
    assert found.ids == max(scores, key=scores.__getitem__)
    assert found.score == pytest.approx(scores[found.ids])


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 2},
        {"num_beams": 4, "length_penalty": 2.0},
        {"num_beams": 4, "early_stopping": True},
        {"num_beams": 4, "num_samples": 4},
        {"num_beams": 3, "num_samples": 2, "early_stopping": True},
        {"num_beams": 3, "repetition_penalty": 1.3, "min_new_tokens": 4, "length_penalty": 0.0},
        {"num_beams": 4, "num_samples": 4, "ends": {1, 3}},
        {"num_beams": 3, "early_stopping": True, "ends": set(range(9))},
    ],
    ids=str,
)
def test_ids_and_scores_are_those_of_transformers(given: dict[str, Any]) -> None:
    """`ends`: a text ends behind two ids of these too, as a stop string might."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.7, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(config).eval()
    prompts, eos = [[3, 9], [5, 5, 7, 1]], (4, 8)

    @torch.no_grad()
    def model(ids: list[int]) -> Tensor:
        logits: Tensor = theirs(torch.tensor([ids])).logits[0, -1]
        return logits

    given = dict(given)
    criteria, seen = given.pop("ends", set()), set()

    def stops(ids: Sequence[int]) -> bool:
        return len(ids) > 1 and set(ids[-2:]) <= criteria

    def is_finished(number: int, beam: int, ids: Sequence[int]) -> Reason | None:
        seen.add(number)
        return "stop" if stops(ids) else None

    class Ends(transformers.StoppingCriteria):  # type: ignore[misc, name-defined]
        def __call__(self, ids: Tensor, scores: Any, **options: Any) -> Tensor:
            return torch.tensor([stops(row[len(prompt) :]) for row in ids.tolist()])

    options = GenerationOptions(max_new_tokens=12, **given)
    count = given.pop("num_samples", 1)
    found = search(options, model, prompts, eos, is_finished if criteria else lambda *text: None)
    assert seen == (set(range(len(prompts))) if criteria else set())
    ended = set()
    for prompt, ours in zip(prompts, found, strict=True):
        output = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False, max_new_tokens=12, eos_token_id=list(eos), pad_token_id=0, top_k=None,
            num_return_sequences=count, output_scores=True, return_dict_in_generate=True,
            stopping_criteria=[Ends()] if criteria else None,
            **given,
        )  # fmt: skip
        texts = output.sequences[:, len(prompt) :].tolist()
        assert len(ours) == len(texts) == count
        for each, text, score in zip(ours, texts, output.sequences_scores.tolist(), strict=True):
            ends = [text[place] in eos or stops(text[: place + 1]) for place in range(len(text))]
            text = text[: ends.index(True) + 1] if any(ends) else text  # it is filled up to the longest one
            assert list(each.ids) == text
            assert each.score == pytest.approx(score, rel=1e-5)
            assert each.reason == ("stop" if any(ends) else "length")
            ended.add(any(ends))
    if "early_stopping" in given:
        assert True in ended
