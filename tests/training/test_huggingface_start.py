"""A run starts from a folder of transformers on any layout: with its weights bit by bit, and its loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.source import Slice
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import Shard
from megatron.settings.command_line import parse_arguments
from megatron.weights.huggingface_config import their_config
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.loader import find_checkpoint
from tests import runs
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments

transformers = pytest.importorskip("transformers")

VOCABULARY = 250


def make(model: str, folder: Path, flags: str = "", **changed: object) -> Path:
    """A random model of transformers: that of these flags of ours, which `changed` does not follow."""
    config, _ = parse_arguments([*layouts.COMMON.split(), *layouts.MODELS[model].split(), *flags.split()])
    described = their_config(config, "fp32", {}) | changed
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**described))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    theirs.save_pretrained(folder)
    return folder


def loss_of(folder: Path) -> float:
    """transformers' own, of the batch that `layouts` trains on first."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(layouts.step_tokens(0, 8, 32))
    with torch.no_grad():
        logits = theirs(tokens[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def newest(folder: Path) -> Checkpoint:
    found = newest_checkpoint(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("bloom_alibi", [("212", 1), ("122", 3)]),
        ("llama_gqa", [("111", 0), ("221", 0), ("122", 1)]),
        ("llama_gqa_tied", [("221", 0)]),
        ("bloom_learned", [("122", 3)]),
        pytest.param("bloom_alibi", [("111", 0), ("221", 0), ("112", 3)], marks=pytest.mark.slow),
        pytest.param("llama_gqa", [("114", 3)], marks=pytest.mark.slow),
        pytest.param("bloom_learned", [("111", 0)], marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_is_that_of_transformers_on_every_layout(
    ranks: RankPools, tmp_path: Path, model: str, places: list[tuple[str, int]]
) -> None:
    folder = make(model, tmp_path / "theirs")
    expected, theirs = loss_of(folder), HuggingFaceSource(folder)
    for layout, zero in places:
        world_size, flags = arguments(layout, zero=zero)
        saved = tmp_path / f"{layout}{zero}"
        losses = ranks(world_size)(
            layouts.resume_then_save, f"{layouts.MODELS[model]} {flags}", str(folder), str(saved)
        )
        assert losses[0] == pytest.approx(expected, abs=1e-5), layout
        found = newest(saved)
        assert found.metadata["progress"]["iteration"] == 0
        assert found.kinds == ("weight",), "a fresh optimizer has no moments before its first step"
        for name in found.parameters:
            assert torch.equal(found.read_full(name), theirs.read_full(name)), (name, layout)


@pytest.mark.parametrize("model", ["llama_gqa", "bloom_alibi"])
def test_added_tokens_start_as_the_mean_of_the_others_on_every_layout(
    ranks: RankPools, tmp_path: Path, model: str
) -> None:
    folder, size = make(model, tmp_path / "theirs"), 261
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old = {"embedding": theirs.get_input_embeddings().weight.detach()}
    if model == "llama_gqa":
        old["output"] = theirs.get_output_embeddings().weight.detach()
    first: dict[str, torch.Tensor] = {}
    for layout, zero in (("111", 0), ("221", 0), ("112", 3)):
        world_size, flags = arguments(layout, zero=zero)
        saved, flags = tmp_path / layout, f"{layouts.MODELS[model]} {flags} --vocab-size {size}"
        losses = ranks(world_size)(layouts.resume_then_save, flags, str(folder), str(saved))
        assert all(0 < loss < 20 for loss in losses)
        found = newest(saved)
        tables = {name: found.read_full(name) for name, shard in found.parameters.items() if shard.shape[0] == size}
        assert len(tables) == len(old)
        for (name, table), rows in zip(tables.items(), old.values(), strict=True):
            assert torch.equal(table[:VOCABULARY], rows), name
            torch.testing.assert_close(table[VOCABULARY:], rows.double().mean(0).float().expand(size - VOCABULARY, -1))
            assert torch.equal(table, first.setdefault(name, table)), f"{name} on {layout}"


@pytest.mark.parametrize("model", ["bloom_learned", "bloom_alibi", "llama_gqa"])
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 24])
def test_any_stretch_of_any_cut_is_read(
    model: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the whole tensor, cut by Shard.take."""
    key = "num_hidden_layers" if model == "llama_gqa" else "n_layer"
    folder = make(model, tmp_path / "theirs", "--num-layers 1", **{key: 1})
    flags = [*layouts.COMMON.split(), *layouts.MODELS[model].split(), "--num-layers", "1"]
    config, _ = parse_arguments(flags)
    start, whole = HuggingFaceSource(folder, config), HuggingFaceSource(folder)
    monkeypatch.setattr("megatron.weights.huggingface_source.CHUNK_BYTES", chunk_bytes)
    for name, shard in whole.map.shards.items():
        full = whole.read_full(name).clone()
        for size in (1, 2):
            padded = Shard(shard.shape, shard.dim, shard.pieces, 6 if shard.shape[0] == VOCABULARY else 0)
            for rank in range(size):
                local = padded.take(full, rank, size).flatten()
                for begin, end in (
                    (0, len(local)),
                    (len(local) // 3, len(local) // 2 + 5),
                    (len(local) - 3, len(local)),
                ):
                    found = start.read(Slice(name, padded, begin, end - begin, rank, size))
                    assert torch.equal(found, local[begin:end]), (name, size, rank, begin, end)
                if shard.dim is None:
                    break


def test_a_rank_reads_only_the_rows_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("llama_gqa", tmp_path / "theirs")
    config, _ = parse_arguments([*layouts.COMMON.split(), *layouts.MODELS["llama_gqa"].split()])
    start = HuggingFaceSource(folder, config)
    shard = Shard((VOCABULARY, 64), 0, (VOCABULARY,), 6)
    taken: list[tuple[int, int]] = []
    tensor = start.stored["model.embed_tokens.weight"]
    rows = tensor.rows

    def noted(first: int, end: int) -> torch.Tensor:
        taken.append((first, end))
        return rows(first, end)

    object.__setattr__(tensor, "rows", noted)
    start.read(Slice("embedding.word.weight", shard, 64 * 10, 64 * 20, 1, 2))
    assert taken == [(138, 158)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-layers 2 --norm-epsilon 1e-4", r"num_layers=2 here, 4 there; norm_epsilon=0.0001 here, 1e-05 there"),
        (
            "--vocab-size 249",
            r"vocab_size=249 here, 250 there\. Take them from it: .*, or python tools/model_config\.py ",
        ),
        ("--ckpt-step 3", r"ckpt_step=3 would do nothing; leave it out"),
    ],
)
def test_another_model_and_options_without_use_are_refused(tmp_path: Path, flags: str, told: str) -> None:
    folder = make("llama_gqa", tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=told):
        find(folder, flags)
    assert find(folder, "--finetune --no-load-optim --no-load-rng") is not None  # what happens anyway


def find(folder: Path, flags: str = "") -> Any:
    """What a run of one rank starts from."""
    words = f"{layouts.COMMON} {layouts.MODELS['llama_gqa']} --load {folder} {flags}".split()
    return find_checkpoint(parse_arguments(words)[0], ParallelContext.single())


def test_a_folder_that_is_both_is_refused(tmp_path: Path) -> None:
    folder = make("llama_gqa", tmp_path / "theirs")
    assert isinstance(find(folder, "--finetune"), HuggingFaceSource)
    (folder / "global_step3").mkdir()
    (folder / "global_step3/checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="beside checkpoints of a run; keep one of them"):
        find(folder)
    shutil.rmtree(folder / "global_step3")
    described = json.loads((folder / "config.json").read_text()) | {"model_type": "x"}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="model_type='x'"):
        find(folder)


def test_a_run_says_where_it_started_and_goes_on_from_its_own_checkpoints(ranks: RankPools, tmp_path: Path) -> None:
    """Supervised: the same command, started again."""
    tiny = "--num-layers 2 --hidden-size 32 --seq-length 16 --vocab-size 128 --global-batch-size 8"
    folder, data = make("llama_gqa", tmp_path / "theirs", tiny), runs.write_dataset(tmp_path / "data")
    command = (
        f"{layouts.MODELS['llama_gqa']} --data-path {data} --load {folder} --finetune --save {tmp_path / 'saved'} "
        "--train-samples 48 --exit-interval 3"
    )
    assert ranks(2)(runs.announced, command)[0] == [f"started from {folder}: weights; iteration 0, 0 samples"]
    resumed = f"resumed {tmp_path / 'saved'}/global_step3: weights, optimizer, random streams; iteration 3, 24 samples"
    assert ranks(2)(runs.announced, command)[0] == [resumed]
    assert newest(tmp_path / "saved").metadata["progress"]["iteration"] == 6
    assert newest(tmp_path / "saved").metadata["source"]["config"]["model_type"] == "llama"


@pytest.mark.parametrize("apart", ["missing", "another"])
def test_a_folder_that_is_not_the_same_on_all_hosts_is_refused(ranks: RankPools, tmp_path: Path, apart: str) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
        runs.write_dataset(disk / "tokens")
    tiny = "--num-layers 2 --hidden-size 32 --seq-length 16 --vocab-size 128"
    make("llama_gqa", disks[0] / "theirs", tiny)
    if apart == "another":
        make("llama_gqa", disks[1] / "theirs", tiny, num_hidden_layers=3)
    words = f"{layouts.MODELS['llama_gqa']} --data-path tokens --load theirs --train-iters 1"
    for said in ranks(2)(runs.train_apart, [str(disk) for disk in disks], words):
        assert "load=theirs holds theirs on" in said
        assert "but another one, or none, on" in said
