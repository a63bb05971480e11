"""Evaluations as their ranks run them. Runs inside the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import patch

from megatron import evaluate


def run(arguments: list[str], device: str = "cpu") -> str:
    """Evaluate by a command line; what rank 0 prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), patch("torch.distributed.destroy_process_group"):
        evaluate.main(["--device", device, *arguments])
    return said.getvalue() if os.environ["RANK"] == "0" else ""
