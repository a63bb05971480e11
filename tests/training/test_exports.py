"""The Hugging Face folders of a run: when, of what, whole or not there, and what becomes of those that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.checkpoint import saver
from megatron.checkpoint.folders import checkpoint_folders, iteration_of
from megatron.checkpoint.format import Fragment
from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.observability.metrics import MetricsLog
from megatron.parallel.context import ParallelContext
from megatron.runtime import files
from megatron.settings.command_line import parse_arguments
from megatron.training import exports
from megatron.weights import conversion
from megatron.weights.huggingface import parameters_of
from megatron.weights.huggingface_files import WeightsWriter
from megatron.weights.huggingface_source import HuggingFaceSource
from tests import runs
from tests.ranks import RankFailure, RankPools

transformers = pytest.importorskip("transformers")

LLAMA = "--architecture llama --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "tokens")


def command(data: Path, folder: Path, more: str, samples: int = 48) -> str:
    """Steps of 6 samples; exports to folder/hf."""
    saved = f"--save {folder / 'saved'} --load {folder / 'saved'} --save-hf {folder / 'hf'}"
    return f"{LLAMA} --data-path {data} --global-batch-size 6 --train-samples {samples} {saved} {more}"


def names(folder: Path) -> list[str]:
    """All that is there, the lock aside."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def made_of(export: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((export / "export.json").read_text())
    return found


def assert_is_checkpoint(export: Path, checkpoint: Path) -> None:
    """The very weights, in a folder that transformers reads whole."""
    native, theirs = conversion.open_model(conversion.Opening(checkpoint)), HuggingFaceSource(export)
    assert made_of(export)["token"] == native.source.token  # type: ignore[attr-defined]
    for name, tensor in native.tensors():
        assert torch.equal(theirs.read_full(name), tensor), name


def train_and_hear(arguments: str) -> tuple[str, list[str]]:
    """The fault that ended a run, and what was said of exports."""
    said: list[str] = []
    with patch.object(MetricsLog, "message", lambda log, text: said.append(text)):
        fault = runs.train(arguments)
    return fault, [line for line in said if "export" in line]


def train_with_slow_saves(arguments: str) -> list[str]:
    """What is said of the checkpoints of a run, each of which takes a moment in the background."""
    said: list[str] = []
    complete = saver._Job.complete

    def late(*job: Any) -> Any:
        time.sleep(0.5)
        return complete(*job)

    with (
        patch.object(saver._Job, "complete", late),
        patch.object(MetricsLog, "message", lambda log, text: said.append(text)),
    ):
        assert runs.train(arguments) == ""
    return [line.split(" in ")[0] for line in said if line.startswith("saved ")]


# ---------------------------------------------------------------------------------------------------------------------
# When, and of what


def test_damaged_weights_are_not_exported(tmp_path: Path) -> None:
    config, _ = parse_arguments(
        f"{LLAMA} --num-layers 1 --hidden-size 16 --vocab-size 32 --seq-length 8 --save-hf {tmp_path / 'hf'}".split()
    )
    fragments = [
        Fragment(name, kind, shard, 0, 1, 0, torch.ones(shard.shape).flatten())
        for name, shard in parameters_of(config).items()
        for kind in ("weight", "exp_avg")
    ]
    metadata = {"config": config.to_dict(), "progress": {"iteration": 2, "consumed_samples": 8}}
    checkpoint = write_checkpoint(tmp_path / "saved", "global_step2", fragments, metadata)
    made, ctx = exports.Exports(config, 0), ParallelContext.single()
    at = next(at for at in Checkpoint(checkpoint).fragments if at.kind == "weight")
    with (checkpoint / at.file).open("r+b") as file:
        for value, said in (
            (3, r"WARNING: .*samples_8 was not exported.*weight of .* has the checksum"),
            (1, "export"),
        ):
            file.seek(at.offset)
            file.write(torch.tensor(float(value)).numpy().tobytes())
            file.flush()
            assert re.match(said, made.export(checkpoint, None, "samples_8", ctx, lambda: None)[0])
    made.close()
    assert made_of(tmp_path / "hf/samples_8")["checked"] == (
        f"of the checkpoint, the CRC-32 of {len(parameters_of(config))} tensors and the SHA-256 of checkpoint.json; "
        "the exported files carry no checksum"
    )


def test_no_multiple_of_save_samples_is_missed(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """Steps of 6 and multiples of 16: one at each step that reaches or passes one, and at the end."""
    assert ranks(1)(runs.train, command(data, tmp_path, "--save-samples 16", samples=94)) == [""]
    expected = [18, 36, 48, 66, 84, 90]
    assert names(tmp_path / "hf") == sorted(f"samples_{samples}" for samples in expected)
    saved = sorted(iteration_of(path.name) for path in checkpoint_folders(tmp_path / "saved"))
    assert saved == [samples // 6 for samples in expected]
    for samples in expected:
        export = tmp_path / "hf" / f"samples_{samples}"
        assert (made_of(export)["consumed_samples"], made_of(export)["iteration"]) == (samples, samples // 6)
        assert_is_checkpoint(export, tmp_path / "saved" / f"global_step{samples // 6}")


def test_a_step_over_several_multiples_exports_once(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    assert ranks(1)(runs.train, command(data, tmp_path, "--save-samples 2", samples=12)) == [""]
    assert names(tmp_path / "hf") == ["samples_12", "samples_6"]


def test_a_last_step_that_is_being_saved_is_exported_without_a_second_save(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    words = command(data, tmp_path, "--save-interval 2", samples=12)
    assert ranks(1)(train_with_slow_saves, words) == [[f"saved {tmp_path}/saved/global_step2"]]
    assert names(tmp_path / "hf") == ["samples_12"]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --num-query-groups 2"),
        (2, "--zero-stage 3 --untie-embeddings-and-output-weights --micro-batch-size 1"),
        pytest.param(1, "--bf16", marks=pytest.mark.slow),
    ],
)
def test_an_export_has_our_logits_in_transformers(
    ranks: RankPools, tmp_path: Path, data: Path, world_size: int, layout: str
) -> None:
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0"))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    words = command(data, tmp_path, f"{layout} --tokenizer-model {tmp_path / 'tokenizer'}", samples=24)
    assert ranks(world_size)(runs.train, words) == [""] * world_size
    export = tmp_path / "hf/samples_24"
    assert names(tmp_path / "hf") == ["samples_24"], "without save_samples, one at the end"
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert model.dtype == (torch.bfloat16 if "bf16" in layout else torch.float32)
    native, found = (
        conversion.open_model(conversion.Opening(tmp_path / "saved")),
        conversion.open_model(conversion.Opening(export)),
    )
    precision = native.config.training.precision
    assert conversion.compare_tensors(native, found, precision, lambda numel: None) > 10
    assert "largest logit difference" in conversion.compare_logits(native, found, precision)
    assert transformers.AutoTokenizer.from_pretrained(export).convert_tokens_to_ids("t7") == 7


def test_the_last_one_alone_replaces_the_one_before(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    words = command(data, tmp_path, "--save-samples 16 --save-hf-last-only")
    assert ranks(1)(runs.train, words) == [""]
    assert names(tmp_path / "hf") == ["last_epoch"]
    assert_is_checkpoint(tmp_path / "hf/last_epoch", tmp_path / "saved/global_step8")


def test_exports_are_kept_and_counted_apart_from_checkpoints(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    (tmp_path / "hf/samples_1").mkdir(parents=True)  # somebody else's
    assert ranks(1)(runs.train, command(data, tmp_path, "--save-samples 12 --keep-last 1 --save-hf-keep-last 2")) == [
        ""
    ]
    assert names(tmp_path / "hf") == ["samples_1", "samples_36", "samples_48"]


def test_what_is_there_is_not_made_again_and_that_of_another_run_is(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    words, place = command(data, tmp_path, "--save-samples 16"), tmp_path / "hf/samples_18"
    assert ranks(1)(runs.train, f"{words} --exit-interval 3") == [""]
    inode = place.stat().st_ino
    fault, said = ranks(1)(train_and_hear, words)[0]
    assert fault == ""
    assert [line.split(" in ")[0] for line in said] == [f"exported {tmp_path}/hf/samples_{n}" for n in (36, 48)]
    assert place.stat().st_ino == inode
    before = {name: (tmp_path / "hf" / name).stat().st_ino for name in names(tmp_path / "hf")}
    assert sorted(before) == ["samples_18", "samples_36", "samples_48"]
    assert ranks(1)(train_and_hear, words) == [("", [])]  # complete already
    assert {name: (tmp_path / "hf" / name).stat().st_ino for name in names(tmp_path / "hf")} == before
    other = words.replace(f"{tmp_path}/saved", f"{tmp_path}/other")
    said = f"save_hf={tmp_path}/hf holds exports of another run (samples_18, samples_36, samples_48)"
    assert said in ranks(1)(runs.train, f"{other} --seed 5")[0]
    assert ranks(1)(runs.train, f"{other} --seed 5 --allow-used-save --save-hf-keep-last 3") == [""]
    assert names(tmp_path / "hf") == sorted(before)
    assert_is_checkpoint(place, tmp_path / "other/global_step3")


def test_a_model_from_hugging_face_goes_back_there(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """With more tokens; its tokenizer and generation config go along."""
    few = runs.write_dataset(tmp_path / "few", vocabulary=120)
    assert ranks(1)(runs.train, command(few, tmp_path / "first", "--vocab-size 120", samples=6)) == [""]
    start = tmp_path / "first/hf/samples_6"
    Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0")).save(str(start / "tokenizer.json"))
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "temperature": 0.7}))
    words = command(data, tmp_path, "--no-save-optim", samples=12).replace(
        f"--load {tmp_path}/saved", f"--load {start}"
    )
    assert ranks(2)(runs.train, f"{words} --zero-stage 1 --micro-batch-size 1") == ["", ""]
    export = tmp_path / "hf/samples_12"
    assert transformers.AutoConfig.from_pretrained(export).vocab_size == 128
    assert json.loads((export / "generation_config.json").read_text())["temperature"] == 0.7
    assert json.loads((export / "config.json").read_text())["eos_token_id"] == 3
    assert (export / "tokenizer.json").is_file()


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def train_and_die(arguments: str, moment: str) -> None:
    """A run that is killed in its second export: while weights are written, or between the two renamings."""
    writes, rename = WeightsWriter.write, os.rename
    seen = 0

    def write(writer: WeightsWriter, name: str, parts: Any, first: int) -> None:
        nonlocal seen
        seen += name == "model.norm.weight"
        if seen == 2 and moment == "writing":
            os._exit(9)
        writes(writer, name, parts, first)

    def renaming(source: Any, target: Any) -> None:
        rename(source, target)
        if moment == "renaming" and ".replaced-" in str(target):
            os._exit(9)

    with patch.object(WeightsWriter, "write", write), patch.object(files.os, "rename", renaming):
        runs.train(arguments)


@pytest.mark.parametrize(("moment", "last_only"), [("writing", False), ("renaming", True)])
def test_a_kill_leaves_the_old_one_or_none_and_the_next_start_makes_up_for_it(
    ranks: RankPools, tmp_path: Path, data: Path, moment: str, last_only: bool
) -> None:
    words = command(data, tmp_path, "--save-samples 16" + (" --save-hf-last-only" if last_only else ""))
    with pytest.raises(RankFailure, match="died"):
        ranks(1)(train_and_die, words, moment)
    old, new = ("last_epoch", "last_epoch") if last_only else ("samples_18", "samples_36")
    seen = {name for name in names(tmp_path / "hf") if not name.startswith(".")}
    assert seen == (set() if moment == "renaming" else {old})
    assert any(name.startswith(".") for name in names(tmp_path / "hf"))
    if moment == "writing":
        assert_is_checkpoint(tmp_path / "hf" / old, tmp_path / "saved/global_step3")
    else:  # both are whole
        for name in names(tmp_path / "hf"):
            assert made_of(tmp_path / "hf" / name)["checkpoint"] in ("global_step3", "global_step6")
    fault, said = ranks(1)(train_and_hear, words)[0]
    assert fault == ""
    assert [line.split(" in ")[0] for line in said] == [
        f"exported {tmp_path}/hf/{name}" for name in (new, "last_epoch" if last_only else "samples_48")
    ]
    assert names(tmp_path / "hf") == (["last_epoch"] if last_only else ["samples_18", "samples_36", "samples_48"])


def train_onto_a_full_disk(arguments: str, fails: list[int]) -> tuple[str, list[str]]:
    """`train_and_hear`, where the exports of these numbers find no room, on rank 0."""
    made, count = WeightsWriter.__init__, 0

    def full(writer: WeightsWriter, *given: Any) -> None:
        nonlocal count
        count += 1
        if count in fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
        made(writer, *given)

    with patch.object(WeightsWriter, "__init__", full):
        return train_and_hear(arguments)


def test_a_full_disk_is_told_and_training_goes_on_but_the_end_fails(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    words = command(data, tmp_path, "--save-samples 16")
    told = ranks(2)(train_onto_a_full_disk, f"{words} --micro-batch-size 1", [1])
    for fault, said in told:
        assert "SaveError: not exported: " in fault
        assert f"{tmp_path}/hf/samples_18: model.safetensors: No space left" in fault
        assert said[0].startswith(f"WARNING: {tmp_path}/hf/samples_18 was not exported, older exports are as they were")
    assert names(tmp_path / "hf") == ["samples_36", "samples_48"]
    assert newest_checkpoint(tmp_path / "saved").metadata["progress"]["iteration"] == 8  # type: ignore[union-attr]


def test_the_last_one_alone_counts_where_it_alone_is_kept(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    words = command(data, tmp_path, "--save-samples 16 --save-hf-last-only")
    fault, said = ranks(1)(train_onto_a_full_disk, words, [2])[0]
    assert (fault, len(said)) == ("", 3)
    assert_is_checkpoint(tmp_path / "hf/last_epoch", tmp_path / "saved/global_step8")
    longer = f"{words.replace('48', '54')} --override-opt-param-scheduler"
    fault, _ = ranks(1)(train_onto_a_full_disk, longer, [1])[0]
    assert "last_epoch: model.safetensors: No space left" in fault
    assert_is_checkpoint(tmp_path / "hf/last_epoch", tmp_path / "saved/global_step8")


def test_what_is_no_export_is_not_replaced(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    (tmp_path / "hf/samples_12").mkdir(parents=True)
    (tmp_path / "hf/samples_12/notes.txt").write_text("mine")
    assert "not an export of a run; move it away" in ranks(1)(runs.train, command(data, tmp_path, "", samples=12))[0]
    assert names(tmp_path / "hf/samples_12") == ["notes.txt"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--position-embedding-type learned", "has no Hugging Face form"),
        ("--tokenizer-model {folder} --vocab-size 100", "has ids up to 127, but the model's vocab_size is 100"),
    ],
)
def test_what_could_never_be_exported_is_refused_before_the_first_step(
    ranks: RankPools, tmp_path: Path, flags: str, told: str
) -> None:
    data = runs.write_dataset(tmp_path / "tokens", vocabulary=100)
    Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    words = command(data, tmp_path, flags.format(folder=tmp_path / "tokenizer.json"), samples=12)
    assert told in ranks(1)(runs.train, words)[0]
    assert checkpoint_folders(tmp_path / "saved") == []


def export_slowly(arguments: str) -> int:
    """Signs of progress on this rank, of an export that takes 0.02 s a tensor."""
    writes, beats = WeightsWriter.write, []

    def write(writer: WeightsWriter, name: str, parts: Any, first: int) -> None:
        time.sleep(0.02)
        writes(writer, name, parts, first)

    with (
        patch.object(WeightsWriter, "write", write),
        patch.object(exports, "POLL_S", 0.01),
        patch("megatron.resilience.watchdog.Watchdog.beat", lambda _: beats.append(1)),
    ):
        assert runs.train(arguments) == ""
    return len(beats)


def test_ranks_that_wait_for_an_export_are_seen_to_be_alive(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    words = command(data, tmp_path, "--micro-batch-size 1", samples=6)
    assert min(ranks(2)(export_slowly, words)) >= 5
