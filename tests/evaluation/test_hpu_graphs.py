"""Evaluation and generation on tensor-parallel ranks by HPU graphs, on the stand-in: figures and texts of the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from tests.evaluation import runs
from tests.generation import commands
from tests.habana import devices
from tests.ranks import RankFailure, RankPools

TP2 = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return commands.write_model(tmp_path_factory.mktemp("model"))


def test_texts_by_graphs_are_those_of_the_cpu(ranks: RankPools, hpu_ranks: RankPools, model: Path) -> None:
    # two prompts at once, then one; the places that are read grow from 64 to 128
    words = ["--load", str(model), "--prompt", "a story of two lines", "a", "another", "--batch-size", "2"]
    words += ["--max-new-tokens", "60"]
    ((expected, _),) = ranks(1)(commands.generate, words)
    found = hpu_ranks(2)(devices.generate, [*words, *TP2, "--use-graphs"], "true")
    assert found[0][0] == expected
    for _, _, calls in found:
        assert calls["replay"] > 60
        assert calls["capture_begin"] == 2
    assert "2 graphs captured" in found[0][1]


def test_a_datasets_figures_by_graphs_are_those_of_other_passes(
    ranks: RankPools, hpu_ranks: RankPools, model: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "text"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document(np.random.default_rng(3).integers(0, 256, 9000).astype(np.uint16))
        builder.finalize()
    words = ["--load", str(model), "--dataset", str(prefix), "--max-length", "256"]
    ranks(1)(runs.run, [*words, "--output", str(tmp_path / "cpu.json")])
    results = {}
    for option in ("none", "true"):
        output = tmp_path / f"{option}.json"
        calls = hpu_ranks(2)(devices.evaluate, [*words, *TP2, "--use-graphs", option, "--output", str(output)], "true")
        results[option] = json.loads(output.read_text())["datasets"][str(prefix)]
        for each in calls:  # four rows of eight sequences, and what is left: the first of a layout runs by itself
            assert (each["capture_begin"], each["replay"]) == ((1, 3) if option == "true" else (0, 0))
    assert results["true"] == results["none"]
    expected = json.loads((tmp_path / "cpu.json").read_text())["datasets"][str(prefix)]
    assert results["true"]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_graphs_of_several_ranks_need_lazy_collectives(hpu_ranks: RankPools, model: Path) -> None:
    words = ["--load", str(model), "--prompt", "a", *TP2, "--use-graphs"]
    with pytest.raises(RankFailure, match="PT_HPU_ENABLE_LAZY_COLLECTIVES=false keeps collectives out of HPU graphs"):
        hpu_ranks(2)(devices.generate, words, "false")
