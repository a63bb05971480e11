"""A teacher's file is that of the dense model, equal on two layouts; a student on another layout learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.distillation import losses
from megatron.data.label_file import LabelFile, create_label_file
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.tasks.loss_function import LossBatch, Teacher
from megatron.tasks.pretrain import PretrainTask
from megatron.training.build import build_engine
from megatron.training.resume import find_start, restore_start
from tests import runs
from tests.ranks import RankPools
from tests.tasks.chats import write_chats

LOSSES = losses.__file__
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
DATA = f"{PLAIN} --train-samples 48 --eval-interval 6 --split 8,2,0"
STUDENT = f"{DATA} --num-layers 1 --hidden-size 16 --loss {LOSSES}:forward_kl"


@pytest.fixture(scope="module")
def folder(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, and a teacher that was trained on it."""
    folder = tmp_path_factory.mktemp("distillation")
    runs.write_dataset(folder / "text")
    flags = f"--data-path {folder / 'text'} --train-iters 30 --save {folder / 'teacher'} --split 8,2,0"
    assert ranks(1)(runs.train, flags) == [""]
    return folder


def write(ranks: RankPools, folder: Path, copy: str, world_size: int = 1, layout: str = "") -> list[LabelFile]:
    """Write the files of a copy of the data; return those of training and validation."""
    (folder / copy).mkdir(exist_ok=True)
    for name in ("text.bin", "text.idx"):
        (folder / copy / name).write_bytes((folder / name).read_bytes())
    flags = f"--data-path {folder / copy / 'text'} {DATA} --load {folder / 'teacher'} --skip-train --teacher-top-k 6"
    assert set(ranks(world_size)(runs.train, f"{flags} {layout}")) == {""}
    files = [LabelFile(path) for path in (folder / copy).glob("text.teacher-*.safetensors")]
    return sorted(files, key=lambda file: -len(file.done))


@pytest.fixture(scope="module")
def written(ranks: RankPools, folder: Path) -> list[LabelFile]:
    return write(ranks, folder, "one")


def dense_teacher(flags: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [48, 16, vocabulary] of the teacher in float64, and the labels."""
    config = load_config([*runs.TINY.split(), *flags.split(), "--no-pipeline-parallel"])
    ctx = ParallelContext.build(config.parallel, "cpu")
    task = PretrainTask(config)
    data: Any = task.data.open(ctx)[0]
    tokens = torch.from_numpy(data.get_batch(range(48)))
    engine = build_engine(config, ctx, task)
    restore_start(engine, find_start(config, ctx))
    hidden, weight = engine.module.double()(tokens[:, :-1], lambda outputs: outputs)
    logits = (hidden @ weight.t())[..., : config.model.vocab_size].transpose(0, 1)
    return logits.log_softmax(-1).detach(), tokens[:, 1:]


def test_a_file_is_that_of_the_dense_model(ranks: RankPools, folder: Path, written: list[LabelFile]) -> None:
    train, valid = written
    assert (len(train.done), len(valid.done)) == (48, 16)
    assert train.done.all()
    assert valid.done.all()
    assert train.ids is not None
    assert [train.log_probs.dtype.name, train.ids.dtype.name] == ["float16", "uint16"]
    ((log_probs, _),) = ranks(1)(dense_teacher, f"--data-path {folder / 'text'} {DATA} --load {folder / 'teacher'}")
    values, ids = log_probs.flatten(0, 1).topk(6)
    np.testing.assert_allclose(train.log_probs.astype(np.float32), values.numpy(), rtol=1e-3)
    assert (train.ids == ids.numpy()).mean() > 0.999


@pytest.mark.parametrize(
    ("world_size", "layout", "is_equal"),
    [
        (4, "--pipeline-model-parallel-size 2", True),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel", False),
        pytest.param(4, "--context-parallel-size 2", False, marks=pytest.mark.slow),
    ],
)
def test_files_are_equal_on_layouts(
    ranks: RankPools, folder: Path, written: list[LabelFile], world_size: int, layout: str, is_equal: bool
) -> None:
    for file, other in zip(written, write(ranks, folder, str(world_size), world_size, layout), strict=True):
        assert file.path.name == other.path.name
        if is_equal:
            assert file.path.read_bytes() == other.path.read_bytes()
        np.testing.assert_allclose(file.log_probs, other.log_probs, atol=2e-3)


def test_a_computation_goes_on_where_it_was(ranks: RankPools, folder: Path, written: list[LabelFile]) -> None:
    train, _ = write(ranks, folder, "again")
    file = LabelFile(train.path, writes=True)
    file.done[5:20] = 0
    file.log_probs[5 * 16 : 20 * 16] = 1.0
    file.log_probs[:16] = -1.0  # of a sample that is done: not computed again
    train, _ = write(ranks, folder, "again")
    assert train.done.all()
    assert (train.log_probs[:16] == -1).all()
    np.testing.assert_array_equal(train.log_probs[16:], written[0].log_probs[16:])


def test_a_student_of_another_size_learns_on_any_layout(
    ranks: RankPools, folder: Path, written: list[LabelFile], tmp_path: Path
) -> None:
    small = tmp_path / "small.safetensors"  # of the same teacher, for fewer samples
    create_label_file(small, written[0].facts, 1, 16, 6, 128)
    teacher = " ".join(map(str, [small, *(file.path for file in written)]))
    found = []
    for world_size, layout in ((1, ""), (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2")):
        flags = f"{STUDENT} --num-layers 2 --lr 3e-2 --data-path {folder / 'text'} --teacher {teacher} {layout}"
        results = tmp_path / str(world_size)
        assert set(ranks(world_size)(runs.train, f"{flags} --results-dir {results}")) == {""}
        found.append([[row["lm_loss"] for row in runs.rows(results, kind)] for kind in ("train", "valid")])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
        assert one[-1] < 0.7 * one[0]


def test_chats_are_distilled_however_they_are_packed(ranks: RankPools, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", [9, 14, 12, 7, 16, 3], seed=1)
    flags = f"{PLAIN} --task sft --vocab-size 250 --data-path {chats} --split 1,0,0 --global-batch-size 6"
    save = tmp_path / "teacher"
    assert ranks(1)(runs.train, f"{flags} --micro-batch-size 1 --num-epochs 3 --save {save}") == [""]
    flags += f" --num-epochs 1 --load {save}"
    teach = f"{flags} --skip-train --teacher-top-k 100 --max-batch-len 32 --micro-batch-size 1"
    assert set(ranks(2)(runs.train, teach)) == {""}
    (file,) = tmp_path.glob("chats.teacher-*")
    learn = f"{flags} --finetune --packing none --teacher {file} --loss {LOSSES}:forward_kl"
    assert ranks(1)(runs.train, f"{learn} --results-dir {tmp_path / 'out'}") == [""]
    (row,) = runs.rows(tmp_path / "out")
    assert row["lm_loss"] == pytest.approx(0, abs=1e-4)  # a model is its own teacher
    assert row["grad_norm"] < 1e-2


def test_the_loss_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (
        torch.randn(2, 3, 8, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    values, ids = teacher.topk(3)
    given = Teacher(ids, values, student.gather(-1, ids))
    batch = LossBatch(*(torch.zeros(2, 3),) * 5, ParallelContext.single())  # type: ignore[arg-type]
    p = torch.cat([values.exp(), 1 - values.exp().sum(-1, keepdim=True)], -1)
    q = torch.cat([given.student_log_probs.exp(), 1 - given.student_log_probs.exp().sum(-1, keepdim=True)], -1)
    expected = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(losses.forward_kl(student[..., 0], batch, given), expected)
    whole = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    assert (expected < whole).all()
    half = losses.forward_kl_and_labels(student[..., 0], batch, given)
    torch.testing.assert_close(half, 0.5 * expected - 0.5 * student[..., 0])


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--teacher {train} {valid} --seed 9", "teacher has no file of the train data"),
        (
            "--teacher {train} {valid} --vocab-size 136",
            "is of a teacher with vocab_size=128, but this model has 136; teacher and student need",
        ),
        ("--teacher {train} {valid} {other}", "teacher has files of different teachers, "),
        ("--teacher {train} {other}", "/other.safetensors; give those of one"),
        ("--teacher {losses}", "is not a file that a run with teacher_top_k wrote, or it is damaged"),
    ],
)
def test_another_teacher_is_refused(
    ranks: RankPools, folder: Path, written: list[LabelFile], flags: str, fault: str
) -> None:
    train, valid = written
    other = folder / "other.safetensors"  # of the same data, by another teacher
    weights = valid.facts["weights"]
    other.write_bytes(valid.path.read_bytes().replace(weights.encode(), weights[::-1].encode()))
    flags = flags.format(train=train.path, valid=valid.path, other=other, losses=LOSSES)
    words = f"{STUDENT} --data-path {folder / 'text'} --tensor-model-parallel-size 2 {flags}"
    found = ranks(2)(runs.train, words)
    assert all(fault in message for message in found), found


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--loss {losses}:forward_kl", "takes a teacher; give teacher, the files that a run with teacher_top_k wrote"),
        ("--loss {losses}:forward_kl --teacher none", "teacher=none is not a file"),
        ("--teacher {losses}", "is given, but no loss that takes a teacher"),
        ("--teacher-top-k 4", "teacher_top_k=4 writes what the model in load computes, without training"),
        ("--teacher-top-k 400 --skip-train --load none", "teacher_top_k=400 is more than vocab_size=128"),
        ("--teacher-top-k 4 --task preference", "is for next-token prediction, not task=preference"),
    ],
)
def test_faults_are_reported_before_anything_starts(flags: str, fault: str) -> None:
    words = f"{runs.TINY} --train-iters 4 --data-path none {flags.format(losses=LOSSES)}"
    with pytest.raises(ConfigError) as refused:
        load_config(words.split(), 1)
    assert any(fault in found for found in refused.value.faults), refused.value.faults
