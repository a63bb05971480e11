"""The tasks of this package by name, and the task of a config. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from megatron.options.config import Config, ConfigError
from megatron.options.plugins import find_plugin
from megatron.tasks.preference import PreferenceTask
from megatron.tasks.pretrain import PretrainTask
from megatron.tasks.sft import SFTTask
from megatron.tasks.task import Task

TASKS: Mapping[str, type[Task]] = {"preference": PreferenceTask, "pretrain": PretrainTask, "sft": SFTTask}


def load_task(config: Config) -> Task:
    """Return the task that the config selects. Raises ConfigError if it is unknown or its options are wrong."""
    return _task_named(config.training.task)(config)


@cache
def _task_named(name: str) -> type[Task]:
    task: type[Task] = find_plugin("task", name, TASKS)
    if not hasattr(task, "Data"):
        raise ConfigError([f"task={name!r} is not a task; give a subclass of megatron.tasks.task.Task"])
    return task
