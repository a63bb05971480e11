"""A model that is loaded, or taken from a run under way, computes what transformers does, on any layout."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import newest_checkpoint, open_checkpoint
from megatron.options.config import ConfigError
from megatron.options.model import LoraConfig
from megatron.parallel.context import ParallelContext
from megatron.weights.huggingface import export_huggingface
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.loader import find_checkpoint
from megatron.weights.model import whole_model
from megatron.weights.peft.export import AdaptedModel, export_adapter
from tests.generation.stages import Array, loaded, loaded_logits, logits_in_training
from tests.generation.theirs import CASES, LAYOUTS, VOCABULARY, their_logits, write_folder
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments

transformers = pytest.importorskip("transformers")

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
    native = whole_model(checkpoint)
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


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 and 2, of which a weight of the newer one has a flipped bit."""
    folder = tmp_path_factory.mktemp("damaged")
    for steps in (1, 2):
        layouts.train_then_save(f"{layouts.MODELS['llama_gqa_tied']} {arguments('111')[1]}", steps, str(folder))
    newest = newest_checkpoint(folder)
    assert newest is not None
    at = next(each for each in newest.fragments if each.kind == "weight")
    path = newest.folder / at.file
    content = bytearray(path.read_bytes())
    content[at.offset] ^= 1
    path.write_bytes(content)
    return folder


def test_a_damaged_newest_checkpoint_is_not_replaced_by_an_older_one_unasked(
    damaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remedy = "name another by ckpt_step, or set load_fallback for the newest one that is intact"
    with pytest.raises(CheckpointError, match=f"(?s)newest checkpoint .*cannot be used: .*global_step2.*{remedy}"):
        loaded({"load": str(damaged)})
    assert loaded({"load": str(damaged), "load_fallback": True}).origin.ckpt_step == 1  # type: ignore[union-attr]
    assert "global_step2 is passed over" in caplog.text
    assert loaded({"load": str(damaged), "ckpt_step": 1}).origin.ckpt_step == 1  # type: ignore[union-attr]
    missing = tmp_path / "missing"
    shutil.copytree(damaged, missing)
    (missing / "global_step2" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="global_step2"):
        loaded({"load": str(missing)})
    with pytest.raises(CheckpointError, match="global_step2"):  # conversion, inspection, and bases of adapters
        open_checkpoint(missing)
    assert loaded({"load": str(missing), "load_fallback": True}).origin.ckpt_step == 1  # type: ignore[union-attr]


def test_a_damaged_newest_checkpoint_is_not_validated_by_an_older_one(damaged: Path) -> None:
    flags = f"{layouts.MODELS['llama_gqa_tied']} {arguments('111')[1]} --load {damaged}"
    config = layouts.build(flags)[0].config
    ctx = ParallelContext.single()
    resumed = find_checkpoint(config, ctx)
    assert resumed is not None
    assert resumed.folder.name == "global_step1"
    training = dataclasses.replace(config.training, skip_train=True)
    with pytest.raises(CheckpointError, match="global_step2"):
        find_checkpoint(dataclasses.replace(config, training=training), ctx)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [("122s", 1), ("112", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("211", 0), ("112", 2)))],
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


def write_adapter(
    base: Path, folder: Path, targets: tuple[str, ...] = ("q_proj", "down_proj"), *, use_dora: bool = False
) -> Path:
    """Adapters in PEFT's format with random numbers, on q_proj and down_proj of a Llama."""
    config = HuggingFaceSource(base).config
    lora = LoraConfig(lora_rank=4, lora_alpha=8.0, lora_target_modules=targets, use_dora=use_dora)
    config = dataclasses.replace(config, lora=lora)
    generator = torch.Generator().manual_seed(4)
    shards = AdaptedModel(config).shards
    tensors = (
        (name, torch.randn(shard.shape, generator=generator) * 0.1 + ("magnitude" in name))
        for name, shard in shards.items()
    )
    export_adapter(folder, config, tensors, base_name=str(base))
    return folder


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
@pytest.mark.parametrize("layout", ["one", "TP2", "PP2"])
def test_adapters_are_loaded_with_their_base(
    ranks: RankPools, folders: Callable[[str], Path], tmp_path: Path, layout: str, merge: bool
) -> None:
    base = folders("llama_gqa")
    folder = write_adapter(base, tmp_path)
    found = load_file(folder / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, down in found.items():
            if ".lora_A." in name:
                update = 2.0 * found[name.replace("lora_A", "lora_B")] @ down
                place = name.removeprefix("base_model.model.").replace(".lora_A", "")
                model.get_parameter(place).add_(update)
        expected = model(torch.from_numpy(TOKENS), use_cache=False).logits.transpose(0, 1).numpy()
    world_size, options = LAYOUTS[layout]
    options = options | {"merge_adapter": merge}  # not in place: other tests read LAYOUTS
    assert_near(ranks(world_size)(loaded_logits, {"load": str(folder), **options}, TOKENS)[-1], expected)


@pytest.mark.parametrize(
    ("name", "layout", "targets", "use_dora"),
    [
        ("llama_gqa_tied_wide_heads", "PP2", ("embed_tokens", "o_proj", "gate_proj"), False),  # becomes untied
        ("llama_gqa", "TP2", ("all-linear", "embed_tokens", "lm_head"), True),
        ("bloom_12_heads", "PP2 TP2", ("all-linear",), True),
    ],
)
def test_merged_adapters_compute_the_same(
    ranks: RankPools,
    folders: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    layout: str,
    targets: tuple[str, ...],
    use_dora: bool,
) -> None:
    folder = write_adapter(folders(name), tmp_path, targets, use_dora=use_dora)
    (expected,) = ranks(1)(loaded_logits, {"load": str(folder)}, TOKENS)
    world_size, options = LAYOUTS[layout]
    found = ranks(world_size)(loaded_logits, {"load": str(folder), "merge_adapter": True, **options}, TOKENS)[-1]
    assert_near(found, expected)
    assert np.abs(expected - their_logits(folders(name), TOKENS)).max() > 0.1 * np.abs(expected).max()


def test_what_cannot_be_merged_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    base = folders("llama_gqa")
    with pytest.raises(CheckpointError, match="is a whole model; merge_adapter is for adapters: leave it out"):
        loaded_logits({"load": str(base), "merge_adapter": True}, TOKENS)
    folder = write_adapter(base, tmp_path)
    with pytest.raises(ConfigError, match="give --quantize-base none to merge into the base as its folder holds it"):
        loaded_logits({"load": str(folder), "merge_adapter": True, "quantize_base": "nf4"}, TOKENS)
