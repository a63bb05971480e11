"""Merge adapters into a Hugging Face folder: a copy of the base, in which the adapted tensors are replaced in place.

All other bytes are the base's. Some rows of one tensor are in memory at a time. The order of operations, and so every
bit in float32, is that of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.files import sync_file
from megatron.interop.folder_files import own_file, read_json, real_path
from megatron.interop.foreign_files import ForeignFiles
from megatron.interop.huggingface_files import StoredTensor, bytes_of, open_weights, some, write_at
from megatron.interop.native import check_space
from megatron.interop.peft import CONFIG, PeftAdapter, PeftFactors, open_adapter

PIECE_BYTES = 1 << 25
"""Size of the pieces in which a tensor is read, merged and written."""
PREFIXES = ("transformer.", "model.")
"""Modules that hold the model without its output projection; published files may leave them out of the names."""
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_MODULES = ("c_attn", "q_attn", "c_proj", "c_fc")
"""transformers' Conv1D: its weights are (in_features, out_features)."""
INPUTS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tokens_embed")
OUTPUTS = ("lm_head", "embed_out")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".safetensors")


@dataclass
class _Change:
    """Changes of one tensor of the base."""

    whole: list[tuple[float, StoredTensor]] = field(default_factory=list)
    """(weight, tensor) of adapters that replace it."""
    added: list[Callable[[int, int, torch.dtype], Tensor]] = field(default_factory=list)
    """(first row, end, dtype) -> what is added to those rows."""

    def apply(self, rows: Tensor, first: int, end: int) -> Tensor:
        """Return the merged rows, in the dtype of the base."""
        if len(self.whole) == 1 and self.whole[0][0] == 1:
            rows = self.whole[0][1].rows(first, end).to(rows.dtype)
        elif self.whole:
            base = rows.float()
            rows = sum((w * (saved.rows(first, end).float() - base) for w, saved in self.whole), base).to(rows.dtype)
        for added in self.added:
            rows += added(first, end, rows.dtype)  # in the base's dtype, rounded after each adapter
        return rows


class Merge:
    """A base folder and weighted adapters, checked against each other. Raises CheckpointError.

    Args:
        adapters: (folder, weight) of each. A weight is the factor of what the adapter changes.
    """

    def __init__(self, base: Path, adapters: Sequence[tuple[Path, float]]) -> None:
        if not base.is_dir():
            raise CheckpointError(
                f"base {base} is not a folder; give a Hugging Face model on this disk: download it first"
            )
        self.base = base
        self._config = read_json(own_file(base, "config.json"))
        if self._config.get("quantization_config") is not None:
            raise CheckpointError(
                f"{base / 'config.json'} has a quantization_config; adapters are merged into 16-bit or float32 "
                "weights: give the model's unquantized folder"
            )
        files = ForeignFiles()
        self.tensors = open_weights(base, files)
        loose = next((tensor.file for tensor in self.tensors.values() if tensor.begin is None), None)
        if loose is not None:
            raise CheckpointError(
                f"{loose} is a pickle; the base must be in safetensors: save it again with transformers' "
                "save_pretrained"
            )
        self.changes: dict[str, _Change] = {}
        self.notes: list[str] = []
        for path, weight in adapters:
            self._add(open_adapter(path, files), weight)

    def _add(self, adapter: PeftAdapter, weight: float) -> None:
        if adapter.fan_in_fan_out and self._config.get("model_type") not in CONV1D_MODELS:
            raise CheckpointError(
                f"{adapter.path / CONFIG} has fan_in_fan_out, which is for {', '.join(CONV1D_MODELS)}; if the layers "
                f"of {self.base} are torch's Linear, set it to false there, as PEFT does by itself"
            )
        names = self._names(adapter)
        self._refuse_missing(adapter, names)
        self._refuse_tied(adapter)
        for module, factors in adapter.low_rank.items():
            name = names[f"{module}.weight"]
            transposed = factors.of_embedding or self._is_conv1d(module)
            self._check_shapes(adapter, module, factors, self.tensors[name].shape, transposed)
            self.changes.setdefault(name, _Change()).added.append(_product(factors, weight, transposed))
            if factors.bias is not None:
                bias = names.get(f"{module}.bias")
                if bias is None or self.tensors[bias].shape != factors.bias.shape:
                    raise CheckpointError(
                        f"{adapter.path} has a bias for {module} (lora_bias), which has none in the base"
                    )
                self.changes.setdefault(bias, _Change()).added.append(_scaled(factors.bias, factors.scaling(weight)))
        for saved, tensor in adapter.whole.items():
            expected = self.tensors[names[saved]].shape
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{adapter.path} holds {saved} as {list(tensor.shape)}, the base as {list(expected)}; was the "
                    "adapter trained on this base? Added tokens must be added to the base first"
                )
            self.changes.setdefault(names[saved], _Change()).whole.append((weight, tensor))
        self._note(adapter, names)

    def _names(self, adapter: PeftAdapter) -> dict[str, str]:
        """Return the base's tensors by the names that transformers' model gives them, which its files may shorten."""
        wanted = {f"{module}.weight" for module in adapter.low_rank} | set(adapter.whole)
        forms = [{name: name for name in self.tensors}]
        for prefix in PREFIXES:
            forms.append({name if name.startswith(OUTPUTS) else prefix + name: name for name in self.tensors})
            forms.append({name.removeprefix(prefix): name for name in self.tensors})
        for form in forms:
            if wanted <= set(form):
                return form
        lacking = sorted(wanted - set(forms[0]))
        tied = any(name.startswith(OUTPUTS) for name in lacking)
        remedy = " Its output may be tied with its embedding: untie them first" if tied else ""
        raise CheckpointError(f"{adapter.path} is for {some(lacking)}, which {self.base} does not hold.{remedy}")

    def _refuse_missing(self, adapter: PeftAdapter, names: dict[str, str]) -> None:
        """Compare the tensors of the adapter with what its config says that it has."""
        modules = {
            name.removesuffix(".weight")
            for name, stored in names.items()
            if name.endswith(".weight") and len(self.tensors[stored].shape) == 2
        }
        missing = {module for module in modules if adapter.is_target(module)} if adapter.all_layers else set()
        missing -= set(adapter.low_rank)
        missing |= {name for name in names if adapter.is_saved(name.rpartition(".")[0])} - set(adapter.whole)
        if missing:
            raise CheckpointError(
                f"{adapter.path} lacks {some(sorted(missing))}, which its adapter_config.json names; copy the "
                "folder again"
            )
        surplus = {
            name
            for name in adapter.whole
            if not adapter.is_saved(name.rpartition(".")[0])
            and not (name.endswith("bias") and adapter.bias != "none")
            and name.split(".")[-2] not in INPUTS + OUTPUTS
        } | {module for module in adapter.low_rank if adapter.targets != "all-linear" and not adapter.is_target(module)}
        if surplus:
            raise CheckpointError(
                f"{adapter.path} holds {some(sorted(surplus))}, which its adapter_config.json does not name; copy the "
                "folder again"
            )

    def _refuse_tied(self, adapter: PeftAdapter) -> None:
        """Refuse to change an embedding that the output projection shares: one tensor, but the adapter means one."""
        touched = [*adapter.low_rank, *(name.rpartition(".")[0] for name in adapter.whole)]
        touched = sorted(module for module in touched if module.split(".")[-1] in INPUTS + OUTPUTS)
        separate = any(name.split(".")[-2:-1] == [output] for name in self.tensors for output in OUTPUTS)
        if touched and self._config.get("tie_word_embeddings", not separate):
            changed = [m for m in touched if m in adapter.low_rank or not self._equals_base(adapter, f"{m}.weight")]
            if changed:
                raise CheckpointError(
                    f"{adapter.path} changes {some(changed)}, which the base shares between embedding and output "
                    "(tie_word_embeddings); save the base with an lm_head.weight of its own first"
                )

    def _equals_base(self, adapter: PeftAdapter, name: str) -> bool:
        saved, base = adapter.whole[name], self.tensors[self._names(adapter)[name]]
        return saved.shape == base.shape and all(
            torch.equal(saved.rows(*piece).to(base.dtype), base.rows(*piece)) for piece in _pieces(base)
        )

    def _is_conv1d(self, module: str) -> bool:
        return self._config.get("model_type") in CONV1D_MODELS and module.split(".")[-1] in CONV1D_MODULES

    def _check_shapes(
        self, adapter: PeftAdapter, module: str, factors: PeftFactors, shape: tuple[int, ...], transposed: bool
    ) -> None:
        result = (factors.b.shape[0], factors.a.shape[1])
        if shape != (result[::-1] if transposed else result):
            raise CheckpointError(
                f"{adapter.path} is for another base: its update of {module} has the shape {list(result)}, the base's "
                f"weight {list(shape)}"
            )

    def _note(self, adapter: PeftAdapter, names: dict[str, str]) -> None:
        modules, saved = len(adapter.low_rank), len(adapter.whole)
        self.notes.append(f"{adapter.path}: LoRA of {modules} modules, {saved} whole tensors")
        if adapter.base_name and Path(adapter.base_name).name != self.base.resolve().name:
            self.notes.append(
                f"{adapter.path} was trained on {adapter.base_name}: make sure that {self.base} is that model"
            )
        trained = {name for name in names if name.endswith("bias")} if adapter.bias == "all" else set()
        if adapter.bias == "lora_only":
            trained = {f"{module}.bias" for module in adapter.low_rank} & set(names)
        if kept := sorted(trained - set(adapter.whole)):
            self.notes.append(
                f"{adapter.path} has bias: {adapter.bias}, but not {some(kept)}: those of the base are kept"
            )

    def write(self, work: Path, progress: Callable[[int], object]) -> tuple[list[str], list[str]]:
        """Write the merged model into an empty folder; `progress` receives elements merged.

        Returns the names of the files copied beside the weights, and of those left out. Raises CheckpointError if a
        merged number is not finite.
        """
        weights = {tensor.file.name for tensor in self.tensors.values()}
        entries = sorted(path for path in self.base.iterdir() if path.name not in weights)
        beside = [path.name for path in entries if path.is_file() and _is_beside(path.name)]
        names = sorted(weights) + beside
        check_space(work, sum(real_path(self.base / name).stat().st_size for name in names), "--save")
        for name in names:
            with real_path(own_file(self.base, name)).open("rb") as source, (work / name).open("xb") as copy:
                shutil.copyfileobj(source, copy, PIECE_BYTES)
                sync_file(copy)
        for name, change in self.changes.items():
            self._write_tensor(work, name, change)
            progress(math.prod(self.tensors[name].shape))
        for name in weights:
            with (work / name).open("rb") as file:
                sync_file(file)
        return beside, [path.name for path in entries if path.name not in beside]

    def _write_tensor(self, work: Path, name: str, change: _Change) -> None:
        tensor = self.tensors[name]
        assert tensor.begin is not None
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        descriptor = os.open(work / tensor.file.name, os.O_WRONLY)
        try:
            for first, end in _pieces(tensor):
                rows = change.apply(tensor.rows(first, end), first, end)
                if not bool(rows.isfinite().all()):
                    raise CheckpointError(
                        f"{name} is not finite after merging, in {rows.dtype}: an adapter is damaged, or "
                        "the base's dtype is too narrow for it"
                    )
                write_at(descriptor, tensor.begin + first * row_bytes, bytes_of(rows.contiguous()))
        finally:
            os.close(descriptor)


def _is_beside(name: str) -> bool:
    if name.endswith(".index.json"):
        return name == "model.safetensors.index.json"
    return not name.startswith("adapter_") and not name.endswith(OTHER_WEIGHTS)


def _pieces(tensor: StoredTensor) -> list[tuple[int, int]]:
    count = tensor.shape[0] if tensor.shape else 1
    step = max(1, PIECE_BYTES // max(1, math.prod(tensor.shape[1:]) * 4))
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _all(tensor: StoredTensor) -> Tensor:
    """Read a tensor as float32, to which PEFT raises an adapter's dtype."""
    return tensor.rows(0, tensor.shape[0]).float()


def _product(factors: PeftFactors, weight: float, transposed: bool) -> Callable[[int, int, torch.dtype], Tensor]:
    scaling = factors.scaling(weight)

    def added(first: int, end: int, dtype: torch.dtype) -> Tensor:
        if not transposed:
            return (factors.b.rows(first, end).float() @ _all(factors.a)).mul_(scaling)
        product = (_all(factors.b) @ _all(factors.a)[:, first:end]).T.mul_(scaling)
        return product.to(dtype) if factors.of_embedding else product  # PEFT rounds an embedding's alone before the sum

    return added


def _scaled(bias: StoredTensor, scaling: float) -> Callable[[int, int, torch.dtype], Tensor]:
    return lambda first, end, dtype: bias.rows(first, end).float() * scaling
