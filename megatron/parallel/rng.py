"""Random streams: some that tensor-parallel ranks share, and some of each rank's own.

The device's default generator is the *replicated* stream; the *sharded* one is swapped in where it is needed. Adapters
have two of their own, and a user's loss function one, so that the model draws what it would draw without them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.parallel.layout import Layout


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any mix of numbers and names; the same on every machine and run."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


# Tensor-parallel ranks hold the same residual stream, so its dropout must be the same on all of them; what they hold
# different parts of (heads, rows of the sequence under sequence parallelism) must be dropped independently.
class RandomStreams:
    """The streams of one rank. Their state lives here, that of the replicated one in the default generator."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self.step_key = 0
        """Key of the step, equal on all ranks: for what is drawn without a generator."""

    # from the samples consumed: a resumed run draws what the uninterrupted one would have drawn, and no generator's
    # state needs saving
    def seed_step(self, seed: int, consumed_samples: int, layout: Layout) -> None:
        """Start the streams of this rank for one step. Stages, and ranks that compute other tokens, draw apart."""
        stage, grad_rank, tensor_rank = layout.stage, layout.grad_rank, layout.tensor_rank
        self.step_key = derive_seed(seed, consumed_samples, "step")
        generator = _accelerator()
        own = {
            "sharded": (grad_rank, "sharded", tensor_rank),
            "adapters": (grad_rank, "adapters"),
            "adapters sharded": (grad_rank, "adapters sharded", tensor_rank),
            # a loss is of whole rows, also where context-parallel ranks share them
            "loss": (layout.batch_rank, "loss"),
        }
        for name, parts in own.items():
            _start(generator, derive_seed(seed, consumed_samples, stage, *parts))
            self._states[name] = generator.get_rng_state()
        _start(generator, derive_seed(seed, consumed_samples, stage, grad_rank, "replicated"))

    @contextmanager
    def apart(self, seed: int, consumed_samples: int, layout: Layout) -> Iterator[None]:
        """Within it draw what `seed_step` starts; afterwards all streams go on where they were."""
        generator = _accelerator()
        replicated, states, key = generator.get_rng_state(), self._states, self.step_key
        self._states = {}
        self.seed_step(seed, consumed_samples, layout)
        try:
            yield
        finally:
            generator.set_rng_state(replicated)
            self._states, self.step_key = states, key

    def sharded(self) -> AbstractContextManager[None]:
        """Draw from this tensor-parallel rank's own stream inside."""
        return self._drawing("sharded")

    def adapters(self, *, sharded: bool) -> AbstractContextManager[None]:
        """Draw from the adapters' stream inside: `sharded`, this tensor-parallel rank's own."""
        if sharded:
            return self._drawing("adapters sharded")
        return self._drawing("adapters")

    def loss(self) -> AbstractContextManager[None]:
        """Draw from the stream of a user's loss function inside, which ranks of the same rows share."""
        return self._drawing("loss")

    @contextmanager
    def _drawing(self, stream: str) -> Iterator[None]:
        if stream not in self._states:  # never seeded: a single layer in a unit test
            yield
            return
        generator = _accelerator()
        replicated = generator.get_rng_state()
        generator.set_rng_state(self._states[stream])
        try:
            yield
        finally:
            self._states[stream] = generator.get_rng_state()
            generator.set_rng_state(replicated)

    @contextmanager
    def _replaying(self, states: dict[str, Tensor]) -> Iterator[None]:
        present, self._states = self._states, states
        try:
            yield
        finally:
            self._states = present

    # torch.compile cannot trace checkpoint's contexts; what is inside `function` it still compiles
    # (torch.compiler.disable would do so at import, and import the whole compiler for it: 2 s)
    @torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
    def recomputed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """function(*inputs), whose activations are dropped and computed again in the backward pass.

        Dropout draws the same both times, from all streams.
        """

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), self._replaying(dict(self._states))

        return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def _start(accelerator: Any, seed: int) -> None:
    """Start the default generator of the device from a seed."""
    if accelerator.device_name() == "cpu":
        # torch.manual_seed would also note for CUDA, XPU and MTIA, which are not there, from where it was called, and
        # look on the disk at each file of that stack: milliseconds a step
        torch.default_generator.manual_seed(seed)
    else:
        accelerator.manual_seed(seed)


def dropout(x: Tensor, probability: float, training: bool, streams: RandomStreams, *, sharded: bool) -> Tensor:
    """Inverted dropout from the right stream: `sharded` where tensor-parallel ranks hold different values."""
    if not training or probability == 0.0:
        return x
    if not sharded:
        return torch.nn.functional.dropout(x, probability)
    with streams.sharded():
        return torch.nn.functional.dropout(x, probability)
