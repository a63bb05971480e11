"""Mode of execution, found at the first question."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from habana_frameworks.torch import stand_in


@functools.cache
def _mode_of_process() -> bool:
    return os.getenv("PT_HPU_LAZY_MODE", "1") != "0"


def is_lazy() -> bool:
    return _mode_of_process() if stand_in.lazy is None else stand_in.lazy


def lazy_only(func: Callable[..., None]) -> Callable[..., None]:
    """The function in lazy mode, nothing elsewhere; its result is dropped in both."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> None:
        if is_lazy():
            func(*args, **kwargs)

    return call
