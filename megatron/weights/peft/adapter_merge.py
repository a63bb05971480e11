"""Merge adapters into a Hugging Face folder, file by file: a copy of the base, with the adapted tensors replaced.

All other bytes are the base's, and of the merged numbers every bit is that of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.runtime.files import sync_file
from megatron.weights.base_identity import FILE as IDENTITY
from megatron.weights.base_identity import BaseIdentity, check_identity, read_identity, stored_sums
from megatron.weights.folder_files import EXPORT_RECORD, check_space, own_file, read_json, real_path
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_files import StoredTensor, open_weights, some
from megatron.weights.peft.folder import CONFIG, INPUTS, OUTPUTS, PeftAdapter, PeftFactors, open_adapter
from megatron.weights.peft.merged_files import PIECE_BYTES, BiasUpdate, LowRankUpdate, TensorChange, copy_changed, cuts

# Verification is in float64 and without any merged weight in between. A merged weight W' is compared with base and
# adapters by what they make of random vectors, W' x with W x + s B (A x): a wrong row shows in its own output.
NUM_VECTORS = 4
ROUNDINGS = 8
"""Allowed error of an output, in roundings of a row of the weight. Independent ones add up to less than 2 of them."""


def verify_merge(
    base: Mapping[str, StoredTensor],
    merged: Mapping[str, StoredTensor],
    changes: Mapping[str, TensorChange],
    progress: Callable[[int], object],
) -> str:
    """Compare all tensors, and return what was found as a text; `progress` receives elements.

    Raises CheckpointError, naming the first tensor that is not the base with its adapters.
    """
    worst = 0.0
    for name, tensor in base.items():
        result = merged.get(name)
        if result is None or (result.shape, result.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(f"{name} is missing in the merged model, or of another shape; nothing was kept")
        fault = ""
        if name in changes:
            error = _error(tensor, result, changes[name])
            worst = max(worst, error)
            if not error <= 1:  # NaN neither
                fault = f"off by {error:.3g} times what rounding allows"
        elif not _is_equal(tensor, result):
            fault = "not the base's"
        if fault:
            raise CheckpointError(
                f"the merged {name} is {fault}; nothing was kept. Merge again; if this repeats, test memory and disk"
            )
        progress(math.prod(tensor.shape))
    return (
        f"{len(changes)} merged tensors against base and adapters by {NUM_VECTORS} random vectors each, largest error "
        f"{worst:.2f} of what rounding allows; {len(base) - len(changes)} others equal bit for bit"
    )


def _pieces(tensor: StoredTensor, width: int) -> list[tuple[int, int]]:
    return list(cuts(0, tensor.num_rows, PIECE_BYTES // max(1, width * math.prod(tensor.shape[1:]))))


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare bytes: NaN equals itself, and minus zero differs from zero."""
    return all(
        torch.equal(one.rows(*piece).flatten().view(torch.uint8), other.rows(*piece).flatten().view(torch.uint8))
        for piece in _pieces(one, one.dtype.itemsize)
    )


def _error(base: StoredTensor, merged: StoredTensor, change: TensorChange) -> float:
    """Return the largest error of an output, in parts of what is allowed."""
    expected = _Expected(base, change)
    outputs, squares = _outputs(merged, expected.vectors, expected.transposed)
    # plus the smallest number: a row of zeros has no size, and no error either
    limit = expected.tolerance * (expected.sizes + squares.sqrt()) + torch.finfo(base.dtype).tiny
    return float(((outputs - expected.outputs).abs() / limit[:, None]).max())


class _Expected:
    """Outputs that a merged weight must have, from base and adapters, and how far rounding may move them.

    Shapes: weights [out, in], where the files hold [in, out] their transposed; vectors [in, 4], outputs [out, 4].
    """

    def __init__(self, base: StoredTensor, change: TensorChange) -> None:
        self._base = base
        self.transposed = any(isinstance(step, LowRankUpdate) and step.transposed for step in change.added)
        self._num_inputs = self._inputs_of(base.shape)
        generator = torch.Generator().manual_seed(0)
        # seeded, so that verifying the same files again finds the same
        self.vectors = torch.randn(self._num_inputs, NUM_VECTORS, dtype=torch.float64, generator=generator)
        self._of_base, self._squares = _outputs(base, self.vectors, self.transposed)
        self.outputs = self._of_base
        self.sizes = self._squares.sqrt()
        """Lengths of the rows of all that is added up, in sum: rounding is relative to them."""
        self.tolerance = ROUNDINGS * torch.finfo(base.dtype).eps * max(1, len(change.whole) + len(change.added))
        for weight, saved in change.whole:
            self._replace(weight, saved)
        for step in change.added:
            if isinstance(step, BiasUpdate):
                self._add_bias(step)
            else:
                self._add_product(step)

    def _inputs_of(self, shape: Sequence[int]) -> int:
        if len(shape) < 2:
            return 1
        return shape[0] if self.transposed else math.prod(shape[1:])

    def _replace(self, weight: float, saved: StoredTensor) -> None:
        # the outputs of W + weight (saved - W)
        outputs, squares = _outputs(saved, self.vectors, self.transposed)
        self.outputs = self.outputs + weight * (outputs - self._of_base)
        self.sizes = self.sizes + abs(weight) * (squares.sqrt() + self._squares.sqrt())

    def _add_bias(self, step: BiasUpdate) -> None:
        # [out, 1] @ [1, 4]: a bias is a weight with one input
        bias = step.scaling * step.bias.rows(0, self._base.shape[0]).double()[:, None]
        self.outputs = self.outputs + bias @ self.vectors
        self.sizes = self.sizes + bias.abs()[:, 0]

    def _add_product(self, step: LowRankUpdate) -> None:
        b, a, magnitude = step.in_float64(self._base)
        self.outputs = self.outputs + b @ (a @ self.vectors)
        # no row of B A is longer, by Cauchy and Schwarz; computing it would take the whole product
        self.sizes = self.sizes + b.norm(dim=1) * a.norm()
        if magnitude is None:
            return
        # |W + B A|^2 of each row = |W|^2 + 2 W (B A)^T + |B A|^2, without the sum in memory
        crossed = (_outputs(self._base, a.T, self.transposed)[0] * b).sum(dim=1)
        factor = magnitude / (self._squares + 2 * crossed + (b @ (a @ a.T) * b).sum(dim=1)).sqrt()
        self.outputs = factor[:, None] * self.outputs
        self.sizes = factor.abs() * self.sizes
        # the norm that PEFT divides by is one of float32
        self.tolerance += ROUNDINGS * torch.finfo(torch.float32).eps * math.sqrt(self._num_inputs)


def _outputs(weight: StoredTensor, vectors: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return weight @ vectors, and the sum of squares of each row of the weight; read in pieces."""
    outputs, squares = [], []
    for first, end in _pieces(weight, 8):
        rows = weight.rows(first, end).double()
        if rows.dim() == 1:
            rows = rows[:, None]
        rows = rows.flatten(1)
        if transposed:  # a part of the sum of every output
            outputs.append(rows.T @ vectors[first:end])
            squares.append(rows.square().sum(dim=0))
        else:
            outputs.append(rows @ vectors)
            squares.append(rows.square().sum(dim=1))
    if transposed:
        return torch.stack(outputs).sum(dim=0), torch.stack(squares).sum(dim=0)
    return torch.cat(outputs), torch.cat(squares)


PREFIXES = ("transformer.", "model.")
"""Modules that hold the model without its output projection; published files may leave them out of the names."""
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_MODULES = ("c_attn", "q_attn", "c_proj", "c_fc")
"""transformers' Conv1D: its weights are (in_features, out_features)."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".safetensors")


class Merge:
    """A base folder and weighted adapters, checked against each other. Raises CheckpointError.

    Args:
        adapters: (folder, weight) of each. A weight is the factor of what the adapter changes.
        allow_other_base: Merge with a warning into another base than the one that the adapters belong to.
    """

    def __init__(
        self,
        base: Path,
        adapters: Sequence[tuple[Path, float]],
        *,
        allow_other_base: bool = False,
        base_flag: str = "--base",
    ) -> None:
        if not base.is_dir():
            raise CheckpointError(
                f"base {base} is not a folder; give a Hugging Face model on this disk: download it first"
            )
        self.base, self._allow_other_base, self._base_flag = base, allow_other_base, base_flag
        self._config = read_json(own_file(base, "config.json"))
        if self._config.get("quantization_config") is not None:
            raise CheckpointError(
                f"{base / 'config.json'} has a quantization_config; adapters are merged into 16-bit or float32 "
                "weights: give the model's unquantized folder"
            )
        files = ForeignFiles()
        self.tensors = open_weights(base, files)
        # bytes are replaced at their offsets, which safetensors states
        loose = next((tensor.file for tensor in self.tensors.values() if tensor.begin is None), None)
        if loose is not None:
            raise CheckpointError(
                f"{loose} is a pickle; the base must be in safetensors: save it again with transformers' "
                "save_pretrained"
            )
        self.changes: dict[str, TensorChange] = {}
        self.notes: list[str] = []
        for path, weight in adapters:
            self._add(open_adapter(path, files), weight)

    def _add(self, adapter: PeftAdapter, weight: float) -> None:
        if adapter.fan_in_fan_out and self._config.get("model_type") not in CONV1D_MODELS:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has fan_in_fan_out, which is for {', '.join(CONV1D_MODELS)}; if the layers "
                f"of {self.base} are torch's Linear, set it to false there, as PEFT does by itself"
            )
        # before names are compared: of an output that the base does not hold there would be no tensor to change
        self._join_tied(adapter)
        names = self._names(adapter)
        self._refuse_missing(adapter, names)
        self._refuse_tied(adapter)
        for module, factors in adapter.low_rank.items():
            self._add_factors(adapter, module, factors, weight, names)
        for saved, tensor in adapter.whole.items():
            expected = self.tensors[names[saved]].shape
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{adapter.path} holds {saved} as {list(tensor.shape)}, the base as {list(expected)}; was the "
                    "adapter trained on this base? Added tokens must be added to the base first"
                )
            self.changes.setdefault(names[saved], TensorChange()).whole.append((weight, tensor))
        self._note(adapter, names)
        self._check_base(adapter, names)

    def _add_factors(
        self, adapter: PeftAdapter, module: str, factors: PeftFactors, weight: float, names: Mapping[str, str]
    ) -> None:
        name = names[f"{module}.weight"]
        transposed = factors.of_embedding or self._is_conv1d(module)
        self._check_shapes(adapter, module, factors, self.tensors[name].shape, transposed)
        self.changes.setdefault(name, TensorChange()).added.append(LowRankUpdate(factors, weight, transposed))
        if factors.bias is None:
            return
        bias = names.get(f"{module}.bias")
        if bias is None or self.tensors[bias].shape != factors.bias.shape:
            raise CheckpointError(f"{adapter.path} has a bias for {module} (lora_bias), which has none in the base")
        update = BiasUpdate(factors.bias, factors.scaling(weight))
        self.changes.setdefault(bias, TensorChange()).added.append(update)

    def _check_base(self, adapter: PeftAdapter, names: dict[str, str]) -> None:
        """Compare the base with the one that the adapter belongs to, where its folder says which that is."""
        expected = read_identity(adapter.path)
        totals = {}
        if expected is not None:
            totals = {name: self._sums[stored] for name, stored in names.items() if name in expected.tensors}
        self.notes += check_identity(
            adapter.path,
            expected,
            str(self.base),
            BaseIdentity.of_base(self.base, [totals]),
            option=self._base_flag,
            allowed=self._allow_other_base,
            named=adapter.base.name,
            # every tensor of the base was summed, so one that is missing is a difference
            is_whole=True,
        )

    @cached_property
    def _sums(self) -> dict[str, list[int]]:
        """Sums of the base's tensors, by their names in the files: the whole model is read once."""
        return stored_sums(self.tensors)

    def _names(self, adapter: PeftAdapter) -> dict[str, str]:
        """Return the base's tensors by the names that transformers' model gives them, which its files may shorten."""
        wanted = {f"{module}.weight" for module in adapter.low_rank} | set(adapter.whole)
        # the files' own names first: only where these do not fit is a prefix added or removed
        forms = [{name: name for name in self.tensors}]
        # published files may have been saved from the bare model, or from one within another
        for prefix in PREFIXES:
            forms.append({name if name.startswith(OUTPUTS) else prefix + name: name for name in self.tensors})
            forms.append({name.removeprefix(prefix): name for name in self.tensors})
        for form in forms:
            if wanted <= set(form):
                return form
        lacking = sorted(wanted - set(forms[0]))
        lacks_output = any(name.startswith(OUTPUTS) for name in lacking)
        remedy = " Its output may be tied with its embedding: untie them first" if lacks_output else ""
        raise CheckpointError(f"{adapter.path} is for {some(lacking)}, which {self.base} does not hold.{remedy}")

    def _refuse_missing(self, adapter: PeftAdapter, names: dict[str, str]) -> None:
        """Compare the tensors of the adapter with what its config says that it has."""
        matrices = {
            name.removesuffix(".weight")
            for name, stored in names.items()
            if name.endswith(".weight") and len(self.tensors[stored].shape) == 2
        }
        tied = set()
        if not self._has_output:
            tied = {module for module in matrices if module.split(".")[-1] in INPUTS}
        adapter.check_complete(matrices, names, tied, lora_only=False)

    def _join_tied(self, adapter: PeftAdapter) -> None:
        """Keep one of two equal weights for an embedding and its output, where the base holds one for both."""
        if self._has_output:
            return
        inputs, outputs = ([name for name in adapter.whole if _module(name) in kinds] for kinds in (INPUTS, OUTPUTS))
        if len(inputs) == len(outputs) == 1 and _equal(adapter.whole[inputs[0]], adapter.whole[outputs[0]]):
            del adapter.whole[outputs[0]]
            adapter.selection = replace(adapter.selection, ties=True)

    def _refuse_tied(self, adapter: PeftAdapter) -> None:
        """Refuse to change an embedding that the output projection shares, unless the adapter trained it for both."""
        # a config may leave it out; then one tensor for both in the files shows it
        if not self._config.get("tie_word_embeddings", not self._has_output):
            return
        modules = [*adapter.low_rank, *(name.rpartition(".")[0] for name in adapter.whole)]
        modules = sorted(module for module in modules if module.split(".")[-1] in INPUTS + OUTPUTS)
        names = self._names(adapter)
        changed = [module for module in modules if self._changes_one_use(adapter, module, names)]
        if changed:
            raise CheckpointError(
                f"{adapter.path} changes {some(changed)}, which the base shares between embedding and output "
                "(tie_word_embeddings); save the base with an lm_head.weight of its own first"
            )

    def _changes_one_use(self, adapter: PeftAdapter, module: str, names: Mapping[str, str]) -> bool:
        """Return False for a weight that was trained for both uses, and for the base's own, which PEFT saves too."""
        if module in adapter.low_rank:
            return True
        if adapter.selection.ties and not self._has_output:
            return False
        name = f"{module}.weight"
        return not _equal(adapter.whole[name], self.tensors[names[name]])

    @cached_property
    def _has_output(self) -> bool:
        """The base has an output projection of its own, so that the embedding is for the input alone."""
        return any(_module(name) in OUTPUTS for name in self.tensors)

    def _is_conv1d(self, module: str) -> bool:
        return self._config.get("model_type") in CONV1D_MODELS and module.split(".")[-1] in CONV1D_MODULES

    def _check_shapes(
        self, adapter: PeftAdapter, module: str, factors: PeftFactors, shape: tuple[int, ...], transposed: bool
    ) -> None:
        out, inputs = factors.b.shape[0], factors.a.shape[1]
        expected = (inputs, out) if transposed else (out, inputs)
        if shape != expected:
            raise CheckpointError(
                f"{adapter.path} is for another base: its update of {module} has the shape {[out, inputs]}, the base's "
                f"weight {list(shape)}"
            )

    def _note(self, adapter: PeftAdapter, names: dict[str, str]) -> None:
        modules, saved = len(adapter.low_rank), len(adapter.whole)
        self.notes.append(f"{adapter.path}: LoRA of {modules} modules, {saved} whole tensors")
        if kept := sorted(adapter.selection.biases(names, adapter.low_rank) - adapter.whole.keys()):
            self.notes.append(f"{adapter.path} has bias: lora_only, but not {some(kept)}: those of the base are kept")

    def write(self, work: Path, progress: Callable[[int], object]) -> tuple[list[str], list[str]]:
        """Write the merged model into an empty folder; `progress` receives elements merged.

        Returns the names of the files copied beside the weights, and of those left out. Raises CheckpointError if a
        merged number is not finite.
        """
        # weights of another format beside these are of the unmerged model, and are left out
        weights = {tensor.file.name for tensor in self.tensors.values()}
        entries = sorted(path for path in self.base.iterdir() if path.name not in weights)
        beside = [path.name for path in entries if path.is_file() and _is_beside(path.name)]
        names = sorted(weights) + beside
        check_space(work, sum(real_path(self.base / name).stat().st_size for name in names), "--save")
        for name in beside:
            with real_path(own_file(self.base, name)).open("rb") as source, (work / name).open("xb") as copy:
                shutil.copyfileobj(source, copy)
                sync_file(copy)
        copy_changed(self.base, work, self.tensors, self.changes, progress)
        return beside, [path.name for path in entries if path.name not in beside]

    def verify(self, work: Path, progress: Callable[[int], object]) -> str:
        """Compare what was written with base and adapters: see `verify_merge`. Raises CheckpointError."""
        return verify_merge(self.tensors, open_weights(work, ForeignFiles()), self.changes, progress)


def _module(tensor: str) -> str:
    """Return the last name of the module that a tensor belongs to."""
    return tensor.split(".")[-2] if "." in tensor else ""


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether the tensors are equal in the dtype of `other`."""
    if one.shape != other.shape:
        return False
    pieces = cuts(0, other.shape[0], PIECE_BYTES // max(1, 4 * other.shape[-1]))
    return all(torch.equal(one.rows(*piece).to(other.dtype), other.rows(*piece)) for piece in pieces)


def _is_beside(name: str) -> bool:
    """Return True for a file beside the weights that is true of the merged model too."""
    if name.endswith(".index.json"):
        return name == "model.safetensors.index.json"
    # transformers would load an adapter that lies beside the merged weights on top of them
    if name.startswith("adapter_") or name.endswith(OTHER_WEIGHTS):
        return False
    # both describe the weights before the merge
    return name not in (EXPORT_RECORD, IDENTITY)
