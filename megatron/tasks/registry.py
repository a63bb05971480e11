"""Which class is which task."""

from __future__ import annotations

from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.sft import SFTTask
from megatron.tasks.task import TaskFactory

TASKS: dict[str, TaskFactory] = {"pretrain": PretrainTask.of, "sft": SFTTask.of}
