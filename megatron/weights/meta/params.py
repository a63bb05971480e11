"""Meta's params.json as the config.json of the same Llama. Imports no torch.

Sources: ModelArgs of meta-llama/llama and meta-llama/llama-models; the params.json of Llama 1 to 3.3 and Code Llama.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import CheckpointError, open_file
from megatron.weights.distributed.inert_pickle import PickleFault, Record, read_pickle
from megatron.weights.folder_files import own_file, read_json, real_path
from megatron.weights.zip_frame import zip_entries

PARAMS = "params.json"
WEIGHTS = "consolidated.*.pth"
_RANK_FILE = re.compile(r"consolidated\.(\d+)\.pth")
_EMBEDDING = "tok_embeddings.weight"
_PICKLED = {
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "collections.OrderedDict"),
    *(f"torch.{kind}Storage" for kind in ("Float", "Half", "BFloat16", "Double")),
}
"""Names in the pickle of a file of weights."""

_KNOWN = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len"),
    # of Meta's server, and of a part that the model of text has not
    *("max_batch_size", "vision_max_num_chunks"),
}
_ABSENT: tuple[Any, ...] = (None, False, -1)
"""Values by which Meta's fields are as if they were not there."""
LARGEST = 2**31
"""Beyond any size of a model: Python's integers have no end, torch's do."""

SMALL_LLAMA_32 = {(2048, 16), (3072, 28)}
"""Width and layers of Llama 3.2's 1B and 3B. They tie their embeddings, and divide their frequencies by 32 where the
others divide by 8, which their params.json does not say (meta-llama/llama-models, issues 166 and 241)."""
LLAMA_1_65B = (8192, 80)
"""Width and layers. Its norm_eps is that of Llama 2, whose model of this size has fewer key/value heads."""
SPECIAL_TOKENS = {32000: (1, 2), 32016: (1, 2), 128256: (128000, 128001)}
"""Begin and end of text in Meta's tokenizers, by the size of their vocabularies."""


def is_meta_folder(folder: Path) -> bool:
    """Return True if the folder holds a Llama as Meta publishes it."""
    return os.path.lexists(folder / PARAMS) and any(folder.glob(WEIGHTS))


def config_json(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the config.json of the model in a folder of Meta's, and the file that says so. Raises CheckpointError."""
    params = Params(folder)
    return params.config_json(), params.path


def rank_files(folder: Path) -> list[Path]:
    """Return consolidated.00.pth, 01 and so on, in their order. Raises CheckpointError if one is missing."""
    by_number: dict[int, Path] = {}
    for path in folder.glob(WEIGHTS):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path} does not name a rank (consolidated.00.pth); keep the files of one model")
        # 0 and 00: which of both belongs to the others cannot be seen
        other = by_number.setdefault(int(match[1]), path)
        if other != path:
            raise CheckpointError(f"{path} and {other.name} are of one rank; keep those of one model")
    for expected, number in enumerate(sorted(by_number)):
        if number != expected:
            raise CheckpointError(f"{folder} lacks consolidated.{expected:02}.pth; copy the whole folder")
    return [by_number[number] for number in sorted(by_number)]


def _vocab_size(folder: Path, width: int) -> int:
    """Return the rows of the word embedding, which Llama 1 and 2 cut by columns, Llama 3 by rows.

    The pickle of the first file is read as data, and nothing else of it.
    """
    # a launch has no torch, and needs no more than the two sizes of one tensor
    paths = rank_files(folder)
    with open_file(real_path(paths[0])) as descriptor:
        entries = zip_entries(descriptor, paths[0]) or []
        pickled = next((entry for entry in entries if entry.name.endswith("/data.pkl")), None)
        content = b"" if pickled is None else os.pread(descriptor, pickled.num_bytes, pickled.start)
    try:
        held = read_pickle(content, _PICKLED, lambda storage: storage)
    except PickleFault as error:
        raise CheckpointError(f"{paths[0]} is refused: {error}; copy it again from its source") from None
    # torch.save writes an OrderedDict of a state dict as a record with a state
    tensors = held.state if isinstance(held, Record) else held
    tensor = tensors.get(_EMBEDDING) if isinstance(tensors, dict) else None
    sizes = tensor.arguments[2] if isinstance(tensor, Record) and len(tensor.arguments) > 2 else None
    if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"{paths[0]} has no {_EMBEDDING} of two dimensions; state vocab_size in {folder / PARAMS}"
        )
    return sizes[0] * len(paths) if sizes[1] == width else sizes[0]


class Params:
    """The params.json of a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for a file without the sizes of a model, or with a field that no Llama of text has."""
        self.path = own_file(folder, PARAMS)
        content = read_json(self.path)
        # some copies have the options of the training beside
        self._values = content.get("model", content)
        if not isinstance(self._values, Mapping):
            raise CheckpointError(f"{self.path}: model must be a mapping of its fields; copy the file again")
        # a field that is passed over may change what the model computes, and nothing would look wrong
        unknown = [name for name, value in self._values.items() if name not in _KNOWN and value not in _ABSENT]
        if unknown:
            given = ", ".join(f"{name}={self._values[name]!r:.60}" for name in unknown)
            raise CheckpointError(
                f"{self.path} has {given}, which no Llama of text in full precision has; give that model's folder, or "
                "remove the field if the model computes the same without"
            )
        self.width, self.num_layers, self.num_heads = (self._size(name) for name in ("dim", "n_layers", "n_heads"))
        self.num_groups = self._size("n_kv_heads", self.num_heads)
        # Llama 1 and 2 take it from their tokenizer
        self._folder, self._has_vocab_size = folder, self._get("vocab_size") is not None

    def config_json(self) -> dict[str, Any]:
        """Return the config.json of the model. Raises CheckpointError."""
        vocab_size = self._size("vocab_size") if self._has_vocab_size else _vocab_size(self._folder, self.width)
        theta = self._number("rope_theta", 10000.0)
        config = {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self._ffn_size(),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_groups,
            "vocab_size": vocab_size,
            "max_position_embeddings": self._size("max_seq_len", self._published_length(theta)),
            "rms_norm_eps": self._epsilon,
            "rope_theta": theta,
            "tie_word_embeddings": self._is_small_llama_32,
            "torch_dtype": "bfloat16",
        }
        if self._is_scaled:
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": self._number("rope_scaling_factor", 32.0 if self._is_small_llama_32 else 8.0),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        if vocab_size in SPECIAL_TOKENS:
            config["bos_token_id"], config["eos_token_id"] = SPECIAL_TOKENS[vocab_size]
        return config

    @property
    def _epsilon(self) -> float:
        return self._number("norm_eps", 1e-5)

    @property
    def _is_scaled(self) -> bool:
        value = self._get("use_scaled_rope")
        if value not in (None, True):
            raise CheckpointError(f"{self.path}: use_scaled_rope={value!r:.60} must be true or false; copy it again")
        return value is not None

    @property
    def _is_small_llama_32(self) -> bool:
        return self._is_scaled and (self.width, self.num_layers) in SMALL_LLAMA_32

    def _published_length(self, theta: float) -> int:
        """Return the longest sequence of the release that has these fields: none of them states it."""
        if self._is_scaled:
            return 131072
        if theta >= 1e6:  # Code Llama
            return 16384
        if theta >= 500000.0:  # Llama 3
            return 8192
        # what Llama 1 and 2 do not share is their epsilon, but for the largest of Llama 1
        is_65b = (self.width, self.num_layers) == LLAMA_1_65B and self.num_groups == self.num_heads
        return 2048 if self._epsilon < 1e-5 or is_65b else 4096

    def _ffn_size(self) -> int:
        """Return two thirds of four widths, times the multiplier, rounded up: cut to an integer twice, as Meta's code.

        Raises CheckpointError for a size that is none.
        """
        size = int(2 * 4 * self.width / 3)
        if self._get("ffn_dim_multiplier") is not None:
            size = int(self._number("ffn_dim_multiplier") * size)
        multiple = self._size("multiple_of", 256)
        rounded = -(-size // multiple) * multiple
        if not 0 < rounded < LARGEST:
            raise CheckpointError(f"{self.path}: ffn_dim_multiplier gives an MLP of {rounded} rows; copy it again")
        return rounded

    def _get(self, name: str) -> Any:
        value = self._values.get(name)
        # 0 equals False, and is a size that is wrong
        return None if value is False or value == -1 else value

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < LARGEST:
            raise CheckpointError(f"{self.path}: {name}={value!r:.60} must be a positive integer; copy the file again")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: {name}={value!r:.60} must be a positive number; copy the file again")
        return float(value)
