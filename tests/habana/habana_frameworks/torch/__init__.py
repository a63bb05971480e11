"""As the published package, in its order: the import fixes the mode, and hccl chooses the module of this rank."""

# ruff: noqa: E402, F401
import os

import habana_frameworks.autoload

habana_frameworks.autoload.is_loaded = True

import torch.distributed

from . import core as core
from . import hpu as hpu
from . import stand_in
from .distributed import hccl as hccl

stand_in.record_import()
if os.environ.get("HABANA_STAND_IN") == "1":  # a process of its own, which computes with the device
    from . import device

    device.install_in_process()
