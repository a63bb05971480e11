"""A training task: what it reads (`TaskData`) and what it optimises (`Objective`).

A task is built from the config alone and imports no torch until it reads data: the plan and the validation query it
before torch is loaded. A subclass outside this package is selected by `--task package.module:Class`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from megatron.options.config import Config
from megatron.options.plugins import filled_options
from megatron.tasks.data import Microbatch, TaskData
from megatron.tasks.objective import CrossEntropy, Objective


class Task:
    """Data and objective of a run. A subclass names its two parts."""

    Data: ClassVar[type[TaskData]]
    Objective: ClassVar[type[Objective]] = CrossEntropy
    """Replaced by the user's function or trainer, if `--loss` or `--trainer` names one."""
    Options: ClassVar[type | None] = None
    """Pydantic dataclass of the options in `--task-options NAME=VALUE ...`; None: the task has none."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections of the config that this task reads and no other task does."""

    def __init__(self, config: Config) -> None:
        """Raise ConfigError if the task options are wrong, or the user's loss function cannot be loaded."""
        self.config = config
        options: Any = None
        if self.Options is not None or config.training.task_options:
            owner = f"task={config.training.task}"
            options = filled_options(self.Options, config.training.task_options, "task_options", owner)
        self.data = self.Data(config, options)
        kind = self.Objective
        if config.training.loss is not None:
            # late: few runs have a loss of the user's
            from megatron.tasks.user_loss import UserLoss

            kind = UserLoss
        elif config.training.trainer is not None:
            from megatron.tasks.trainer.loss import TrainerLoss

            kind = TrainerLoss
        self.objective: Objective = kind(config, options, self.data)

    def faults(self, world_size: int) -> Iterator[str]:
        """Yield a message for every broken rule of this task: value, rule, remedy."""
        yield from self.data.faults(world_size)
        yield from self._loss_faults()
        yield from self._teacher_faults()
        yield from self._fp8_faults()
        yield from self.objective.faults()

    def idle(self) -> Iterator[str]:
        """Yield a message for every option that has no effect in this task, given the others."""
        yield from self.data.idle()
        yield from self.objective.idle()

    def read(self, dataset: Any, key: Any) -> Microbatch:
        """Return the microbatch that the plan calls `key`. Called by several threads. Raises DataError."""
        return self.objective.completed(dataset, key, self.data.read(dataset, key))

    @property
    def predicts_tokens(self) -> bool:
        """The task's own loss is the cross-entropy."""
        return self.Objective is CrossEntropy

    def _loss_faults(self) -> Iterator[str]:
        """Yield a message for options of the cross-entropy where the loss is another one."""
        training = self.config.training
        given = training.own_loss
        if given is not None and not self.predicts_tokens:
            yield f"{given} is given, but task={training.task} has a loss of its own; leave one out"
        if training.loss is not None and training.trainer is not None:
            yield f"{given} and trainer={training.trainer} both replace the cross-entropy; leave one out"
        if not training.label_smoothing_factor:
            return
        if given is not None:
            owner = given
        elif not self.predicts_tokens:
            owner = f"the loss of task={training.task}"
        else:
            return
        more = "; its pairs have label_smoothing" if "preference" in self.sections else ""
        yield f"label_smoothing_factor={training.label_smoothing_factor} is not read by {owner}; leave it out{more}"

    def _fp8_faults(self) -> Iterator[str]:
        fp8, varied_by = self.config.fp8, self.data.varied_by
        if not fp8.uses_fp8:
            return
        given = f"fp8_format={fp8.fp8_format}"
        if not self.predicts_tokens:
            yield f"{given} trains task=pretrain and task=sft, not {self.config.training.task}; leave it out"
        # scales are measured again after so many passes, by default those of a step
        is_delayed = self.config.fp8_recipe == "delayed"
        if is_delayed and fp8.fp8_interval is None and varied_by is not None:
            yield (
                f"{given} needs fp8_interval, since {varied_by} varies the microbatches of a step; give their least "
                "number"
            )

    def _teacher_faults(self) -> Iterator[str]:
        training, top_k = self.config.training, self.config.training.teacher_top_k
        for name in training.teacher:
            if not os.path.isfile(name):
                yield f"teacher={name} is not a file; give the files that a run with teacher_top_k wrote"
        if training.teacher and training.own_loss is None:
            yield f"teacher={training.teacher[0]} is given, but no loss that takes a teacher; give one, or leave it out"
        if top_k is None:
            return
        # the file is of one model, not of one that changes under way
        if not training.skip_train:
            yield f"teacher_top_k={top_k} writes what the model in load computes, without training; give skip_train"
        if top_k > self.config.model.vocab_size:
            yield f"teacher_top_k={top_k} is more than vocab_size={self.config.model.vocab_size}; lower it"
        if not self.predicts_tokens:
            yield f"teacher_top_k={top_k} is for next-token prediction, not task={training.task}; use pretrain or sft"
