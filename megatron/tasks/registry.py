"""Which class is which task."""

from __future__ import annotations

from megatron.tasks.pretrain import PretrainTask

TASKS: dict[str, type[PretrainTask]] = {"pretrain": PretrainTask}
