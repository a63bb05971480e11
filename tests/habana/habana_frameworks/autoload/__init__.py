"""What `import torch` calls: the entry point `torch.backends` of the installed distribution loads the device."""

from __future__ import annotations

import os

is_loaded = False


def is_autoload_enabled() -> bool:
    wanted = os.getenv("PT_HPU_AUTOLOAD", "-1")
    if wanted in ("0", "1"):
        return wanted == "1"
    return os.getenv("PT_HPU_LAZY_MODE", "1") != "1"


def __autoload() -> None:
    if is_loaded or not is_autoload_enabled():
        return
    import habana_frameworks.torch  # noqa: F401
