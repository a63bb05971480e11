"""--trainer: compute_loss of a subclass of transformers' Trainer is trained as there, on every layout, or refused."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.settings.validation import idle
from megatron.tasks.sft import SFTTask
from megatron.tasks.trainer.probe import trainer_use
from tests import runs
from tests.finetuning_files import write_model
from tests.ranks import RankPools
from tests.tasks import trainers
from tests.tasks.chats import some_lengths, write_chats

VOCABULARY = 256
CHATS = (
    "--task sft --num-epochs 5 --split 1,0,0 --seq-length 32 --vocab-size 256 --packing step --max-batch-len 64 "
    "--micro-batch-size 1"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats", some_lengths(40, 30, seed=2))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainers.write_trainers(tmp_path_factory.mktemp("mine") / "mine.py")


@pytest.mark.parametrize("name", trainers.USES)
def test_what_a_trainer_is_a_mean_over_is_measured(file: Path, name: str) -> None:
    use = trainer_use(f"{file}:{name}", VOCABULARY)
    assert (use.takes, use.unit) == trainers.USES[name]


@pytest.mark.parametrize("case", trainers.REFUSED)
def test_what_depends_on_more_than_a_sample_is_refused_by_name(tmp_path: Path, case: str) -> None:
    body, expected = trainers.REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        trainer_use(trainers.write_trainer(tmp_path / "mine.py", body), VOCABULARY)
    (fault,) = refused.value.faults
    assert expected in fault, fault
    assert fault.startswith(f"trainer={tmp_path}")


def test_classes_that_are_no_trainers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    other = trainers.LIGHT.replace("class Trainer", "class DPOTrainer")
    path.write_text(f"{other}\nclass Pairs(DPOTrainer):\n    pass\n\nclass Plain:\n    pass\n\ndef loss():\n    pass\n")
    for name, expected in (
        ("Pairs", "extends DPOTrainer, whose batches and loss are others"),
        ("Plain", "does not extend transformers' Trainer"),
        ("loss", "is a function; give a subclass of transformers' Trainer"),
        ("None", "cannot be loaded: AttributeError"),
    ):
        with pytest.raises(ConfigError, match=expected):
            trainer_use(f"{path}:{name}", VOCABULARY)
    # a script that trains as soon as it is imported
    for call in ("main()", "trainer.train()"):
        path.write_text(f"{trainers.LIGHT}\ndef main():\n    raise SystemExit\n\n{call}\n")
        with pytest.raises(ConfigError, match=rf"calls {call[:-2]} when it is imported \(line 8\); put that under"):
            trainer_use(f"{path}:Mine", VOCABULARY)


def test_options_that_a_trainer_replaces_are_refused_and_its_validation_noted(file: Path, data: Path) -> None:
    words = [*runs.TINY.split(), *CHATS.split(), "--data-path", str(data), "--trainer", f"{file}:Tuples"]
    said = [line for line in idle(load_config(words, 1)) if line.startswith("prediction_step (line 23) of trainer=")]
    assert len(said) == 1
    for more, expected in (
        ("--loss tests.tasks.test_objective:focal", "both replace the cross-entropy; leave one out"),
        ("--label-smoothing-factor 0.1", "label_smoothing_factor=0.1 is not read by trainer="),
        ("--task preference", "task=preference has a loss of its own; leave one out"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config([*words, *more.split()], 1)
        assert any(expected in fault for fault in refused.value.faults), refused.value.faults


# A real transformers.Trainer


def collated(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([each[name] for each in samples], True, value) for name, value in fill.items()}


def samples_in_order(flags: str, steps: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The chats in the order of a run, unshifted and alone."""
    task = SFTTask(load_config([*runs.TINY.split(), *flags.split()]))
    dataset: Any = task.data.open(ParallelContext.single())[0]
    chats = getattr(dataset, "samples", dataset)
    plan, found = task.data.plan(dataset, lambda _: size, 0, 1), []
    for step in range(steps):
        for key in plan(step * size)[1]:
            for chat in task.data.samples_of(key):
                ids, mask = (torch.from_numpy(part.astype("int64")) for part in chats.read(chat))
                labels = ids.masked_fill(mask == 0, -100)
                found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    assert len(found) == steps * size
    return found


def losses_of_transformers(owner: type, model: Path, samples: list[Any], folder: Path) -> list[float]:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=10,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = owner(model=theirs, args=arguments, train_dataset=samples, data_collator=collated)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_ten_steps_are_those_of_transformers_trainer(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """Padded batches there, packed rows here; the gradient is clipped in both."""
    pytest.importorskip("transformers")
    from megatron.tasks.trainer.user_class import load_trainer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    # a token of the data that is also the padding has no gradient of its embedding there
    model = write_model(tmp_path / "model", vocab_size=VOCABULARY, pad_token_id=None)
    file = trainers.write_trainers(tmp_path / "mine.py", trainers.REAL)
    flags = f"{CHATS} --data-path {data} --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --weight-decay 0"
    flags += " --adam-beta2 0.999 --adam-eps 1e-8 --clip-grad 1 --eval-iters 0"
    samples = samples_in_order(flags, 10, 8)
    for name in ("Ascent", "Smooth", "BySample"):
        results = tmp_path / name
        ours = f"{flags} --load {model} --finetune --trainer {file}:{name} --train-iters 10 --num-epochs none"
        assert ranks(1)(runs.train_loaded, f"{ours} --results-dir {results}") == [""]
        theirs = losses_of_transformers(
            load_trainer(f"{file}:{name}").owner, model, samples, tmp_path / f"{name}-there"
        )
        found = [row["lm_loss"] for row in runs.rows(results)]
        assert found == pytest.approx(theirs, rel=1e-6), name
        # it is trained: ascent is away from the labels
        assert found[-1] < found[0] - 0.01, name
    if importlib.util.find_spec("optimum") is None:
        head = "from optimum.habana import GaudiConfig, GaudiTrainer as Trainer\n"
        base = load_trainer(f"{trainers.write_trainers(tmp_path / 'gaudi.py', head)}:Tuples").base
        assert (base.__name__, base.__mro__[1].__name__) == ("GaudiTrainer", "Trainer")
        assert not {name for name in sys.modules if name.startswith("optimum")}


# Layouts


def first_step(flags: str, name: str) -> float:
    """The loss of the first step in float64, each chat alone, by torch."""
    from tests.models.outputs import build_model

    config = load_config([*runs.TINY.split(), *flags.split()])
    model = build_model(config, ParallelContext.single()).double()
    total, count = 0.0, 0
    for sample in samples_in_order(flags, 1, 8):
        with torch.no_grad():
            outputs = model(sample["input_ids"][None, :-1], lambda outputs: outputs)
        logits = (outputs[0][:, 0] @ outputs[1].detach().t())[:, :VOCABULARY]
        labels = sample["labels"][1:]
        kept = int((labels != -100).sum())
        if not kept:
            continue
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        if name == "BySample":
            total, count = total - float(losses.sum()) / kept, count + 1
        else:
            total, count = total + float((losses * (1 - torch.exp(-losses)) ** 2).sum()), count + kept
    return total / count


@pytest.mark.parametrize("name", ["Focal", pytest.param("BySample", marks=pytest.mark.slow)])
def test_losses_are_equal_on_every_layout(ranks: RankPools, tmp_path: Path, data: Path, file: Path, name: str) -> None:
    flags = f"{CHATS} --data-path {data} --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
    expected, found = first_step(flags, name), list[list[float]]()
    flags += f" --train-iters 3 --num-epochs none --trainer {file}:{name}"
    for world_size, layout in (
        (1, ""),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--zero-stage 2"),
        (2, "--context-parallel-size 2"),
    ):
        results = tmp_path / str(len(found))
        assert set(ranks(world_size)(runs.train, f"{flags} {layout} --results-dir {results}")) == {""}
        found.append([row["lm_loss"] for row in runs.rows(results)])
        assert found[-1][0] == pytest.approx(expected, abs=1e-5), layout
        assert found[-1] == pytest.approx(found[0], abs=1e-5), layout


def test_ascent_with_adapters_is_equal_on_layouts_and_raises_the_loss(
    ranks: RankPools, tmp_path: Path, file: Path
) -> None:
    """Also in pretraining, whose rows are samples."""
    data = runs.write_dataset(tmp_path / "data")
    flags = f"--data-path {data} --split 8,2,0 --hidden-dropout 0 --attention-dropout 0 --train-iters 6 --lr 1e-2"
    flags += f" --lora-rank 2 --lora-alpha 4 --no-load-optim --trainer {file}:Ascent"
    found: list[list[float]] = []
    for world_size, layout in (
        (1, ""),
        (2, "--tensor-model-parallel-size 2"),
        (4, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
    ):
        results = tmp_path / str(len(found))
        assert set(ranks(world_size)(runs.train, f"{flags} {layout} --results-dir {results}")) == {""}
        found.append([row["lm_loss"] for row in runs.rows(results)])
        assert found[-1] == pytest.approx(found[0], abs=1e-5), layout
    before, *_, after = runs.rows(tmp_path / "0", "valid")
    assert after["metrics"]["nll"] > before["metrics"]["nll"] + 0.02
    # validations compute the trainer's loss
    assert after["lm_loss"] == pytest.approx(-after["metrics"]["nll"], rel=1e-6)


def test_a_loss_that_fails_under_way_ends_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    body = (
        f"{trainers.HEAD}\n        outputs = model(**inputs)\n"
        "        return outputs.loss if inputs['input_ids'].shape[1] < 10 else outputs.logits.sum() * outputs.loss"
    )
    name = trainers.write_trainer(tmp_path / "mine.py", body)
    data = runs.write_dataset(tmp_path / "data")
    flags = f"--data-path {data} --train-iters 2 --tensor-model-parallel-size 2 --trainer {name}"
    for message in ranks(2)(runs.train, flags):
        assert "uses logits, or other labels than its own, of some samples alone" in message
