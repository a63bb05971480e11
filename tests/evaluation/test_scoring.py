"""Log-likelihoods of continuations equal those of transformers, each sequence alone, on any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.generation import stages
from tests.generation.theirs import LAYOUTS, VOCABULARY, their_logits, write_folder
from tests.ranks import RankFailure, RankPools

pytest.importorskip("transformers")

MODELS = ("gpt2", "bloom_12_heads", "llama_gqa")
Request = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_folder(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def requests_of(folder: Path) -> list[Request]:
    """Multiple choices of unequal lengths, one with a greedy answer, and texts on their own."""
    generator = np.random.default_rng(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, VOCABULARY, count).tolist())

    found = []
    for length in (1, 3, 17, 9):
        context = ids(length)
        found += [(context, ids(count)) for count in (1, 4, 2, 1)]
    context = ids(6)
    for _ in range(3):
        best = their_logits(folder, np.array([context]))[-1, 0].argmax()
        context = (*context, int(best))
    found += [(context[:6], context[6:]), (context[:6], (*context[6:8], (context[8] + 1) % VOCABULARY))]
    return [*found, (ids(1), ids(30)), (ids(12), ids(5)), (context[:6], ids(1))]


def expected(folder: Path, requests: list[Request]) -> list[tuple[np.ndarray, bool]]:
    """By transformers' logits, one sequence at a time."""
    found = []
    for context, continuation in requests:
        logits = their_logits(folder, np.array([context + continuation[:-1]]))[len(context) - 1 :, 0]
        log_probs = torch.from_numpy(logits).double().log_softmax(-1).numpy()
        found.append(
            (log_probs[range(len(continuation)), list(continuation)], bool((logits.argmax(-1) == continuation).all()))
        )
    return found


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama_gqa", "one"),
        ("bloom_12_heads", "TP2"),
        ("gpt2", "PP2"),
        ("bloom_12_heads", "DP2"),
        *(pytest.param(name, layout, marks=pytest.mark.slow) for name in MODELS for layout in (*LAYOUTS, "DP2")),
    ],
)
def test_scores_are_those_of_transformers(ranks: RankPools, folders: dict[str, Path], name: str, layout: str) -> None:
    world_size, options = (2, {}) if layout == "DP2" else LAYOUTS[layout]
    requests = requests_of(folders[name])
    theirs = expected(folders[name], requests)
    assert [greedy for _, greedy in theirs].count(True) == 1
    results = ranks(world_size)(stages.scores, {"load": str(folders[name]), **options}, requests, row_tokens=40)
    if layout != "DP2":  # each context is computed once
        contexts = {context for context, _ in requests}
        num_tokens = sum(map(len, contexts)) + sum(len(ids) - 1 for _, ids in requests)
        assert {computed for _, computed in results} == {num_tokens}
    for found, _ in results:
        for (logprobs, is_greedy), (their_logprobs, is_their_greedy) in zip(found, theirs, strict=True):
            np.testing.assert_allclose(logprobs, their_logprobs, rtol=0, atol=2e-5)
            assert is_greedy == is_their_greedy


def test_the_last_layer_computes_what_predicts_a_scored_id(ranks: RankPools, folders: dict[str, Path]) -> None:
    requests = requests_of(folders["llama_gqa"])
    contexts = {context for context, _ in requests}
    behind = sum(len(ids) - 1 for _, ids in requests)
    (counts,) = ranks(1)(stages.tokens_of_mlps, {"load": str(folders["llama_gqa"])}, requests)
    *others, last = counts
    assert set(others) == {sum(map(len, contexts)) + behind}
    # a context's last token predicts the first ids of all its continuations
    assert last == len(contexts) + behind < others[0]


def test_what_cannot_be_scored_is_named(ranks: RankPools, folders: dict[str, Path]) -> None:
    requests: list[Request] = [((1,), (2,)), ((), (3,)), ((4,), ()), ((5,), (VOCABULARY,)), ((6,) * 20, (7,) * 30)]
    with pytest.raises(RankFailure) as failure:
        ranks(1)(stages.scores, {"load": str(folders["gpt2"])}, requests)
    said = str(failure.value)
    assert "request 1 has an empty context" in said
    assert "request 2 has an empty continuation" in said
    assert f"request 3 has the id {VOCABULARY}, but the model's vocabulary has the ids 0 to {VOCABULARY - 1}" in said
    assert "request 4 needs 49 positions, but the model has 40" in said
