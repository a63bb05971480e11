"""Errors of a command line."""

from __future__ import annotations

import pytest

from megatron.options.config import ConfigError
from megatron.settings.command_line import load_config

VALID = ["--data-path", "corpus", "--train-iters", "100"]


def faults_of(arguments: str | list[str], world_size: int = 1) -> list[str]:
    words = arguments.split() if isinstance(arguments, str) else arguments
    with pytest.raises(ConfigError) as caught:
        load_config(words, world_size)
    return caught.value.faults
