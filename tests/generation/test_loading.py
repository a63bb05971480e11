"""A model that is loaded, or taken from a run under way, computes what transformers does, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.reader import newest_checkpoint
from megatron.interop.huggingface import export_huggingface
from megatron.interop.native import native_model
from tests.generation.stages import Array, loaded_logits, logits_in_training
from tests.generation.theirs import CASES, LAYOUTS, VOCABULARY, their_logits, write_folder
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments

pytest.importorskip("transformers")

TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, (2, 24))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that transformers writes of a model, none of whose parameters is as it began."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_folder(name, tmp_path_factory.mktemp(name.replace(".", "_")))
        return made[name]

    return get


def assert_near(found: Array | None, expected: Array, tolerance: float = 1e-5) -> None:
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt2", "PP2"),
        ("bloom_8_heads", "PP2 TP2"),
        ("llama_gqa", "one"),
        ("llama_3.1", "TP2"),
        ("llama_gqa_tied_wide_heads", "PP2"),
        *(pytest.param(name, layout, marks=pytest.mark.slow) for name in CASES for layout in LAYOUTS),
    ],
)
def test_a_folder_of_transformers_has_its_logits(
    ranks: RankPools, folders: Callable[[str], Path], name: str, layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    found = ranks(world_size)(loaded_logits, {"load": str(folders(name)), **options}, TOKENS)
    for logits in found[-options.get("tensor_model_parallel_size", 1) :]:
        assert_near(logits, their_logits(folders(name), TOKENS))


@pytest.fixture(scope="module")
def run(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of a run on 4 ranks, optimizer and all, and the newest as a folder of transformers."""
    folder = tmp_path_factory.mktemp("run")
    flags = f"{layouts.MODELS['llama_gqa_tied']} {arguments('221')[1]}"
    ranks(4)(layouts.train_then_save, flags, 2, str(folder / "saved"))
    checkpoint = newest_checkpoint(folder / "saved")
    assert checkpoint is not None
    native = native_model(checkpoint)
    (folder / "hf").mkdir()
    export_huggingface(folder / "hf", native.config, native.tensors())
    return folder / "saved", folder / "hf"


@pytest.mark.parametrize("layout", ["one", "TP2", pytest.param("PP2", marks=pytest.mark.slow)])
def test_a_checkpoint_of_any_layout_has_the_logits_of_its_export(
    ranks: RankPools, run: tuple[Path, Path], layout: str
) -> None:
    world_size, options = LAYOUTS[layout]
    found = ranks(world_size)(loaded_logits, {"load": str(run[0]), **options}, TOKENS)
    assert_near(found[-1], their_logits(run[1], TOKENS))


@pytest.mark.parametrize(
    ("layout", "zero"), [("122s", 1), ("211", 0), ("112", 3), pytest.param("112", 2, marks=pytest.mark.slow)]
)
def test_a_run_under_way_has_the_logits_of_its_checkpoint(
    ranks: RankPools, tmp_path: Path, layout: str, zero: int
) -> None:
    """Sequence parallelism off, ZeRO-3 gathered; the run goes on as if nothing had been asked of it."""
    world_size, flags = arguments(layout, zero=zero)
    flags = f"{layouts.MODELS['llama_gqa_tied']} {flags}"
    found = ranks(world_size)(logits_in_training, flags, TOKENS)
    losses = ranks(world_size)(layouts.train_then_save, flags, 1, str(tmp_path))
    assert [loss for _, loss in found] == losses
    (expected,) = ranks(1)(loaded_logits, {"load": str(tmp_path)}, TOKENS)
    assert_near(found[-1][0], expected)
