"""Training with experts whose shapes the router does not decide, on the CPU: inside the ranks of tests/ranks.py."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

from megatron.models import experts
from megatron.parallel.expert_exchange import Dispatch
from megatron.runtime.device_cpu import CPU
from tests.training import layouts


def train(arguments: str, steps: int) -> dict[str, Any]:
    """`layouts.train` as a device computes that needs such shapes. Raises AssertionError where sizes are read."""
    device = dataclasses.replace(CPU, static_experts=True)
    wrong = AssertionError("the sizes of a dispatch are read from the device")
    with patch.object(experts, "device_of", lambda kind: device), patch.object(Dispatch, "of", side_effect=wrong):
        return layouts.train(arguments, steps)
