import os

from . import hpu as hpu

if os.environ.get("HABANA_STAND_IN") == "1":  # a process of its own, which computes with the device
    from . import device

    device.install_in_process()
