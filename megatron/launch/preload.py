"""Imports of a rank that can precede its environment: in the fork server, or while the nodes rendezvous.

A fork server on the CPU makes a restart skip seconds of imports. None of these modules opens a device, joins a process
group or starts a thread, except OpenBLAS, which handles forks.
"""

from __future__ import annotations

import gc
import importlib
import os

from megatron.launch.child_processes import end_quietly_without_agent, end_with_parent
from megatron.runtime.devices import launched_device
from megatron.runtime.first_steps import defer_backends, importing

# The fork server ends with the agent, although the ranks hold its pipe open; the ranks end with the fork server.
end_with_parent()()
end_quietly_without_agent()

defer_backends()  # no rank knows its place yet

with importing():
    importlib.import_module("torch.distributed")
    # by which the backward pass of all stages but the last imports sympy
    if os.environ.get("MEGATRON_PIPELINE") == "1":
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if os.environ.get("MEGATRON_TENSORBOARD") == "1":
        importlib.import_module("torch.utils.tensorboard")
    device = launched_device()
    if device is not None and device.survives_fork:  # importing deepspeed elsewhere selects a device
        importlib.import_module(os.environ.get("MEGATRON_MAIN", "megatron.train")).preload()
# a rank's collection would write to all of these objects, and so copy the pages that it shares with the fork server
gc.freeze()
