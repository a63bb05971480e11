"""Switch of fp8: on in the forward passes of training, off in those of evaluation and generation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


class Fp8Passes:
    """Passes of this rank in which linear layers compute in fp8."""

    def __init__(self) -> None:
        self.autocast: Callable[[], AbstractContextManager[Any]] | None = None
        """The engine's context of one pass; None: no fp8."""
        self.is_on = False
        self.is_first_microbatch = False
        """The weights have changed since the previous pass."""

    def begin_step(self) -> None:
        self.is_first_microbatch = True

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of a microbatch, in fp8 where it keeps what a backward pass needs."""
        if (autocast := self.autocast) is None:
            return forward

        @functools.wraps(forward)
        def call(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*arguments, **options)
            self.is_on = True
            try:
                with autocast():
                    return forward(*arguments, **options)
            finally:
                self.is_on = self.is_first_microbatch = False

        return call
