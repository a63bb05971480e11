"""What the fork server of tools/supervise.py imports, and nobody else: it holds in memory what a rank needs.

So a restart does not wait for seconds' worth of imports. None of these opens a device, joins a process group or starts
a thread, but OpenBLAS, which knows of forks.
"""

from __future__ import annotations

from megatron.launch.child_processes import end_with_parent

# the ranks hold it open and so would keep it alive; and they end with it, as it ends with the agent
if at_death := end_with_parent():
    at_death()

import torch.distributed
import torch.utils.tensorboard.writer  # noqa: F401
