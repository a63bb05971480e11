from habana_frameworks.torch import stand_in
from habana_frameworks.torch.utils.internal import is_lazy, lazy_only


def _mark_step_if_lazy(device_str: str = "") -> None:
    if is_lazy():
        mark_step(device_str)


@lazy_only
def mark_step(device_str: str = "", sync: bool = False) -> None:
    stand_in.calls.append(("mark_step", {"device_str": device_str, "sync": sync}))
