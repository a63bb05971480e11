"""The one check that every foreign weights file passes before a byte of it is used.

| file | carries | checked |
|---|---|---|
| .pt, .bin | a zip with the CRC-32 of every entry | all, and that headers and directory agree and leave no byte out |
| .pt, .bin before torch 1.6, or saved without checksums | none | that it contains tensors and plain values alone |
| .safetensors | none | its header: places and sizes of the tensors, without gap, overlap or repetition |

Pickles are opened with weights_only=True, so that nothing in them is executed, and with the few classes of ALLOWED,
each read as an inert record. Tensors stay mapped files until their bytes are needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.folders import open_file
from megatron.checkpoint.format import PIECE_BYTES, CheckpointError
from megatron.runtime.commands import UserError
from megatron.weights.folder_files import real_path
from megatron.weights.zip_frame import ZipEntry, zip_entries

log = logging.getLogger(__name__)

REMEDY = "copy it again from its source"
EAGER_BYTES = 1 << 20
"""Entries up to this size, the pickle among them, are checked when a file is opened; tensors may wait for `verify`."""

ALLOWED = (
    "_io.BytesIO",
    "argparse.Namespace",
    "signal.Signals",
    "types.SimpleNamespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.ModelType",
    "megatron.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.legacy.model.enums.PositionEmbeddingType",
    "megatron.model.enums.ModelType",
    "megatron.model.enums.PositionEmbeddingType",
    # NumPy's random state, which Megatron saves
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
)
"""The classes, beside torch's own harmless ones, that a foreign file may name. None of them is imported."""


class Inert:
    """Stand-in for the classes of ALLOWED: keeps the state, has no behaviour."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass  # nothing is needed of an enumeration or an array

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


@contextlib.contextmanager
def _only_safe(names: list[Any]) -> Iterator[None]:
    """Let torch open pickles that name these alone: libraries, such as megatron-core, register classes of their own."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(names):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


@dataclass
class _Opened:
    """A file that was opened, and how far it has been checked."""

    is_zip: bool = False
    has_checksum: bool = False
    unchecked: tuple[ZipEntry, ...] = ()


class ForeignFiles:
    """Weights files of one foreign checkpoint, and how far each has been checked. Raises CheckpointError by file name.

    A tensor's bytes may be used after `ensure` of its file, or after `verify`, with which ranks share the work.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, _Opened] = {}
        self._all_verified = False

    def load(self, path: Path) -> Any:
        """Return the content of a .pt or .bin file, its tensors mapped, nothing executed."""
        # mapped where it can be: torch maps no file from before its zips
        return load_plain(str(real_path(path)), str(path), mmap=self._open(path).is_zip)

    def safetensors_header(self, path: Path) -> tuple[bytes, int]:
        """Return the JSON in the header of a safetensors file, and the offset at which its tensors begin."""
        file = real_path(path)
        try:
            with safe_open(file, framework="pt"):
                pass  # it checks the header: offsets within the file, no holes, no overlaps
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}); {REMEDY}") from None
        self._opened[path] = _Opened()
        # read again by hand, since safe_open gives no offsets: 8 bytes of length, then JSON
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            return content.read(length), 8 + length

    def ensure(self, path: Path) -> None:
        """Compare the checksums of a file that have not been compared yet, by this rank or in a shared `verify`."""
        if self._all_verified:
            return
        opened = self._open(path)
        if opened.unchecked:
            with open_file(real_path(path)) as descriptor:
                compare_checksums(path, descriptor, opened.unchecked)
            opened.unchecked = ()

    def verify(self, paths: Iterable[Path], share: tuple[int, int] = (0, 1)) -> str:
        """Compare all checksums of this share of the files: every share[1]-th, from the largest down.

        Returns which of the opened files carried a checksum, and which none.
        """
        # dealt out from the largest down, so that the shares come out alike
        by_size = sorted(paths, key=lambda path: (-real_path(path).stat().st_size, path))
        for path in by_size[share[0] :: share[1]]:
            self.ensure(path)
        # the other shares are verified by other ranks, whose fault ends this one too
        self._all_verified = True
        without = sorted(path.name for path, opened in self._opened.items() if not opened.has_checksum)
        number = len(self._opened) - len(without)
        texts = []
        if number:
            texts.append(f"the CRC-32 of every byte of {number} {'file' if number == 1 else 'files'}")
        if len(without) == 1:
            texts.append(f"names, shapes and sizes alone of {without[0]}, which carries no checksum")
        elif without:
            texts.append(
                f"names, shapes and sizes alone of {without[0]} and {len(without) - 1} more, which carry no checksum"
            )
        return "; ".join(texts)

    def _open(self, path: Path) -> _Opened:
        """Check a .pt or .bin file that is opened for the first time, but for its large entries."""
        if path in self._opened:
            return self._opened[path]
        with open_file(real_path(path)) as descriptor:
            entries = zip_entries(descriptor, path)
            opened = _Opened(is_zip=entries is not None)
            if entries and any(entry.crc32 for entry in entries):  # torch writes zeros where it computes none
                opened.has_checksum = True
                compare_checksums(path, descriptor, [entry for entry in entries if entry.num_bytes <= EAGER_BYTES])
                opened.unchecked = tuple(entry for entry in entries if entry.num_bytes > EAGER_BYTES)
        if not opened.has_checksum:
            log.warning("%s carries no checksum, so damage to its tensors cannot be found", path)
        self._opened[path] = opened
        return opened


def load_plain(source: str | IO[bytes], where: str, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote: tensors and plain values, nothing executed. Raises CheckpointError."""
    try:
        # torch takes Inert for the name in the pickle, and imports nothing
        names: list[Any] = [(Inert, name) for name in ALLOWED]
        with _only_safe(names), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about a pickle that this refuses
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"{where} is not there; {REMEDY}") from None
    except Exception as error:  # a hostile file may make torch raise anything
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is not None:
            raise CheckpointError(
                f"{where} is refused: it names {named[1]}, and opening a pickle that names code may run "
                "it. Only tensors and plain values are read from foreign files; save the checkpoint again without "
                "it, or as safetensors"
            ) from None
        if type(error).__name__ == "UnpicklingError":  # torch's own text advises to open it without the check
            raise CheckpointError(
                f"{where} is refused: it is not a file of tensors and plain values as torch.save writes them. "
                f"{REMEDY.capitalize()}, or save the checkpoint again, best as safetensors"
            ) from None
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(f"{where} cannot be read ({type(error).__name__}: {reason}); {REMEDY}") from None


def compare_checksums(where: Path | str, descriptor: int, entries: Iterable[ZipEntry]) -> None:
    """Read the entries, and raise CheckpointError for the first with another checksum."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, max((entry.num_bytes for entry in entries), default=0))))
    for entry in entries:
        checksum, done = 0, 0
        while done < entry.num_bytes:
            count = os.preadv(descriptor, [buffer[: entry.num_bytes - done]], entry.start + done)
            if not count:
                raise CheckpointError(f"{where} is damaged: it ends within {entry.name}; {REMEDY}")
            # ISA-L's, which is zlib's CRC-32 several times as fast
            checksum = isal_zlib.crc32(buffer[:count], checksum)
            done += count
        if checksum != entry.crc32:
            raise CheckpointError(
                f"{where} is damaged: its entry {entry.name} has the checksum {checksum:08x}, not {entry.crc32:08x}; "
                f"{REMEDY}"
            )


def dense(tensor: Any, path: Path, what: str) -> Tensor:
    """Return `tensor` if it is a dense floating point tensor; raise CheckpointError otherwise."""
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_floating_point():
        return tensor
    kind = f"a {tensor.layout} {tensor.dtype} tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
    raise CheckpointError(f"{path} holds {kind} as {what}; it must be a dense floating point tensor")


@contextlib.contextmanager
def as_damage(folder: Path, what: str) -> Iterator[None]:
    """Turn the exceptions that files of another structure than that of `what` cause into CheckpointError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not have the structure of {what} ({type(error).__name__}: {error}); copy it again from its "
            "source"
        ) from error
