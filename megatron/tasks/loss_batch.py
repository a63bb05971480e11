"""Arguments of a user's loss function: a microbatch, a teacher's numbers, and a check that it does not write them.

B rows of a microbatch, S tokens of a row; N samples in it, of at most L tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.tasks.loss_result import LossError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.parallel.context import ParallelContext

IGNORED = -100
"""Label of what is not in the loss, as in torch and transformers."""


# Torch has no tensor that refuses to be written: what the loss needs afterwards is computed before the user's
# function, and version counters are compared after it.
@dataclasses.dataclass(frozen=True)
class LossBatch:
    """Microbatch as a loss function sees it: [B, S], or with `rows` [N, L]. Its tensors are not to be written."""

    labels: Tensor
    """Next tokens, int64; IGNORED where the weight is 0."""
    weights: Tensor
    """Weight of each label in the loss, float32; 0: the label does not count."""
    sources: Tensor
    """Place in `data_path` of the dataset that each label is from, int64, from 0."""
    begins: Tensor
    """Place in its row at which the sample of each label begins, int64: a chat, or in pretraining the row."""
    output_weight: Tensor
    """This rank's rows of the vocabulary: input of `megatron.parallel.losses`."""
    ctx: ParallelContext
    tokens: Tensor | None = None
    """Next tokens, int64, also where they are not in the loss; 0 where there is no sample. None: made by hand."""

    def sample_sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all labels of the same sample that are in the loss, in their shape.

        So a loss of a whole chat is given to each of its labels.
        """
        import torch

        # not a product with the weights: 0 times a value that is not finite would be NaN
        counted = torch.where(self.weights == 0, 0.0, values)
        return torch.zeros_like(counted).scatter_add(1, self.begins, counted).gather(1, self.begins)


class Teacher(NamedTuple):
    """The likeliest tokens of a stored teacher at each label, [B, S, K] or [N, L, K], the likeliest first."""

    ids: Tensor
    """int64"""
    log_probs: Tensor
    """Log-probabilities that the teacher gives them, float32. The others have the rest."""
    student_log_probs: Tensor
    """Those that the model in training gives the same tokens, float32, with a gradient."""


@dataclasses.dataclass(frozen=True)
class LossArguments:
    """The arguments of a call."""

    first: Tensor
    batch: LossBatch
    extras: Mapping[str, Any]

    @property
    def kept(self) -> Tensor:
        return self.batch.weights

    def _tensors(self) -> dict[str, Tensor]:
        """Return what the function may read, and not write, by the names that it knows."""
        fields = ("labels", "tokens", "weights", "sources", "begins", "output_weight")
        tensors = {"its first argument": self.first}
        tensors |= {f"batch.{name}": getattr(self.batch, name) for name in fields}
        teacher = self.extras.get("teacher")
        if teacher is not None:
            tensors |= {f"teacher.{name}": tensor for name, tensor in teacher._asdict().items()}
        if "reference" in self.extras:
            tensors["reference"] = self.extras["reference"]
        return tensors

    def seen(self, *, contents: bool, weight: bool) -> dict[str, tuple[int, Any]]:
        """Return the version of each tensor, which torch counts up when it is written, and its contents.

        These show what NumPy and `.data` write, which the version does not: of the model's `weight`, sums of its rows.
        """
        seen: dict[str, tuple[int, Any]] = {}
        for name, tensor in self._tensors().items():
            is_wanted = weight if tensor is self.batch.output_weight else contents
            seen[name] = tensor._version, None
            if is_wanted:
                seen[name] = tensor._version, self._contents(tensor)
        return seen

    def _contents(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if tensor is self.batch.output_weight:  # as large as the model's vocabulary
            return own.float().sum(-1)
        return own.clone()

    def written_since(self, seen: Mapping[str, tuple[int, Any]]) -> list[str]:
        """Return the names of the tensors that were written."""
        import torch

        def is_written(name: str, tensor: Tensor) -> bool:
            version, contents = seen[name]
            if tensor._version != version:
                return True
            # NaN equals NaN here: what was not finite before is not the function's
            return contents is not None and not torch.equal(contents.nan_to_num(), self._contents(tensor).nan_to_num())

        return [name for name, tensor in self._tensors().items() if is_written(name, tensor)]


@contextlib.contextmanager
def settings_kept(label: str) -> Iterator[None]:
    """Raise LossError if a function leaves gradients switched off, or another dtype of new tensors, for the process."""
    import torch

    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
        if torch.is_grad_enabled() != gradients:
            raise LossError(f"{label} switched gradients for the whole process; use `with torch.no_grad():`")
        if torch.get_default_dtype() != dtype:
            raise LossError(f"{label} set the default dtype of the whole process; give new tensors their own dtype")
    finally:
        # also after its error: what follows must not compute in its settings
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)


def row_places(places: Sequence[tuple[int, int, slice]], shape: Sequence[int]) -> Tensor:
    """Return the place b * S + s of each label of each sample of a microbatch [B, S]: [N, L] int64, -1 for none."""
    import torch

    length = shape[1]
    # [(row, start, stop)] of each sample; a microbatch of padding has one of no labels
    spans = [(row, *where.indices(length)[:2]) for _, row, where in places] or [(0, 0, 0)]
    found = torch.full((len(spans), max(1, *(stop - start for _, start, stop in spans))), -1, dtype=torch.int64)
    for number, (row, start, stop) in enumerate(spans):
        found[number, : stop - start] = torch.arange(row * length + start, row * length + stop)
    return found


def rows_of(values: Tensor, places: Tensor | None, missing: float) -> Tensor:
    """Return values [B, S, ...] one sample a row, [N, L, ...], `missing` where there is none; as they are for None."""
    import torch

    if places is None:
        return values
    # -1 would be the last label of the microbatch: read the first instead, and replace it
    found = values.flatten(0, 1)[places.clamp(min=0)]
    is_none = (places < 0).view(*places.shape, *[1] * (found.dim() - 2))
    return torch.where(is_none, torch.full((), missing, dtype=found.dtype, device=found.device), found)
