"""Meta's params.json as the config.json of the same Llama. Imports no torch, unless the file leaves the vocabulary out.

Sources: ModelArgs of meta-llama/llama and meta-llama/llama-models; the params.json of Llama 1 to 3.3 and Code Llama.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import CheckpointError
from megatron.weights.folder_files import own_file, read_json

PARAMS = "params.json"
WEIGHTS = "consolidated.*.pth"

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
    if params.vocab_size is None:
        from megatron.weights.meta.shards import open_shards  # imports torch

        return params.config_json(open_shards(folder).vocab_size(params.width)), params.path
    return params.config_json(params.vocab_size), params.path


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
        self.vocab_size = None if self._get("vocab_size") is None else self._size("vocab_size")

    def config_json(self, vocab_size: int) -> dict[str, Any]:
        """Return the config.json of the model."""
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
