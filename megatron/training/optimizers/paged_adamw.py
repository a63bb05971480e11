"""AdamW whose states move between device and host page by page, so that they give way to a peak: bitsandbytes' on CUDA.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3, "paged optimizers". Imported late: it needs bitsandbytes.
"""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim import PagedAdamW32bit
from torch import Tensor


class PagedAdamW(PagedAdamW32bit):  # type: ignore[misc]
    """bitsandbytes' class, its moments under torch's names too."""

    def init_state(self, group: Any, parameter: Tensor, group_index: int, index: int) -> None:
        super().init_state(group, parameter, group_index, index)
        state = self.state[parameter]
        # the same tensors: so checkpoints of adamw and of this continue each other
        state["exp_avg"], state["exp_avg_sq"] = state["state1"], state["state2"]

    def allocate_moments(self, parameter: Tensor, step: float) -> None:
        """Allocate the moments of a parameter, as its first step would, and set how many steps they have seen."""
        for group_index, group in enumerate(self.param_groups):
            for index, each in enumerate(group["params"]):
                # init_state pages them, and needs the place of the parameter in the groups
                if each is parameter and not self.state[parameter]:
                    self.init_state(group, parameter, group_index, index)
        # bitsandbytes counts in a number of the host's, torch in a tensor
        self.state[parameter]["step"] = int(step)
