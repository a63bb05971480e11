"""A stand-in of Habana's Python packages that computes on the CPU: put this folder on sys.path.

Names, order and defaults of arguments, types of results and assertions are those of HabanaAI/gaudi-pytorch-bridge
1.19.0; tests/models/test_habana_bridge.py compares them where MEGATRON_GAUDI_BRIDGE names a checkout of it. Tensors are
on the device `hpu` in processes that `install` has given it (the fixture `hpu_ranks`), else on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

PACKAGES = ("habana_frameworks", "intel_transformer_engine", "pyhlml")


def skip_with_cuda() -> None:
    """Skip a test of the stand-in's device where torch is built with CUDA: torch refuses to have both devices."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("the stand-in's device needs a torch that is built without CUDA")


def loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in PACKAGES]


def _forget() -> None:
    if (overwrites := sys.modules.get("habana_frameworks.torch.core.torch_overwrites")) is not None:
        overwrites.restore_torch_functions()
    for name in loaded():
        del sys.modules[name]


def write_distribution(folder: Path, version: str = "1.24.1.482") -> str:
    """Install the packages in a folder, as pip does: with the entry point by which torch loads a device's backend.

    Returns PYTHONPATH for the processes that are to have them.
    """
    info = folder / f"habana_torch_plugin-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ndevice_backend = habana_frameworks.autoload:__autoload\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Packages that are found, but not loaded."""
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.pop(0)
        _forget()
        importlib.invalidate_caches()


def install() -> None:
    """Give this process the device `hpu` for good, and unload the packages."""
    with importable(), patch.dict(os.environ):
        importlib.import_module("habana_frameworks.torch.device").install()


@contextlib.contextmanager
def stand_in_packages(monkeypatch: pytest.MonkeyPatch, *, lazy: bool = True) -> Iterator[Any]:
    """Make the packages importable, newly loaded, and yield `habana_frameworks.torch.stand_in`; then unload them."""
    _forget()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    try:
        with patch.dict(os.environ, {"PT_HPU_LAZY_MODE": str(int(lazy))}):  # the packages set variables
            yield importlib.import_module("habana_frameworks.torch.stand_in")
    finally:
        _forget()
