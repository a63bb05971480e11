"""Differences between the releases of DeepSpeed: upstream's, and the fork in the Gaudi software (0.16 in release 1.21).

All code that depends on the release is here; docs/start/gaudi.md has the table.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest.mock import patch

import deepspeed
from deepspeed.runtime import compiler

NEVER = 2**62
"""More steps than a run has."""


def adapted(settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings as its release takes them.

    The pipeline of the fork divides by steps_per_print, where upstream prints nothing if it is unset.
    """
    return settings if _release() >= (0, 17) else {"steps_per_print": NEVER, **settings}


def prints_steps(engine: Any) -> bool:
    """Return True if the user has set steps_per_print, so that DeepSpeed logs steps itself."""
    return engine.steps_per_print() not in (None, NEVER)


def _release() -> tuple[int, ...]:
    """Return major and minor release."""
    return tuple(int(part) for part in deepspeed.__version__.split(".")[:2])


def import_muon_uncompiled() -> None:
    """Keep torch's compiler out of the start of a run.

    DeepSpeed 0.19.8 checks each optimizer for its Muon, and that module passes functions to torch.compile when it is
    imported: 2 s of processor time a rank, for an optimizer that is not in use. The fork has none.
    """
    with contextlib.suppress(ImportError), patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
