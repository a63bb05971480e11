import os

from . import hpu as hpu

if os.environ.get("HABANA_STAND_IN") == "1":  # a process of its own, which computes with the device
    from . import on_cpu

    on_cpu.install()
