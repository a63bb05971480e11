"""AdamW whose states move between device and host page by page, so that they give way to a peak: bitsandbytes' on CUDA.

Source: Dettmers et al. 2023 (arXiv:2305.14314), section 3, "paged optimizers".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.options.config import ConfigError


def paged_adamw() -> Any:
    """Return bitsandbytes' class, its moments under torch's names too. Raises ConfigError where it cannot be used."""
    try:
        from bitsandbytes.optim import PagedAdamW32bit
    except Exception as error:  # its native library fails in many ways
        raise ConfigError(
            [
                f"optimizer=paged_adamw_32bit needs bitsandbytes on CUDA, which is not usable ({error}); pip install "
                "bitsandbytes, or use optimizer=adamw with offload_optimizer"
            ]
        ) from None

    class PagedAdamW(PagedAdamW32bit):  # type: ignore[misc]
        def init_state(self, group: Any, parameter: Tensor, group_index: int, index: int) -> None:
            super().init_state(group, parameter, group_index, index)
            state = self.state[parameter]
            state["exp_avg"], state["exp_avg_sq"] = state["state1"], state["state2"]

        def allocate_moments(self, parameter: Tensor, step: float) -> None:
            """Allocate the moments of a parameter, as its first step would, and set how many steps they have seen."""
            for group_index, group in enumerate(self.param_groups):
                for index, each in enumerate(group["params"]):
                    if each is parameter and not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
            self.state[parameter]["step"] = int(step)

    return PagedAdamW
