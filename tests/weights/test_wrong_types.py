"""JSON values of a wrong type in another tool's files are named, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.data.chat.preprocessing import ChatJob
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.acceleration import NotAccelerated, accelerate
from megatron.data.tokenizers.build import build_tokenizer
from megatron.weights.foreign_files import ForeignFiles
from megatron.weights.huggingface_config import config_of
from megatron.weights.tokenizer_files import check_tokenizer, special_token_ids
from tests.finetuning_files import write_tokenizer

VALUES: tuple[Any, ...] = (None, True, 0, -1, 10**400, 1.5, "48", [], [1], ["a"], {}, {"a": 1}, [{}], [[]])
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
BLOOM = {
    "model_type": "bloom",
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 512,
    "layer_norm_epsilon": 1e-5,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "seq_length": 128,
    "n_inner": 256,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 128,
    "n_inner": 256,
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0,
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
    "activation_function": "gelu_new",
}


def changed(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """The content with one value replaced by each of VALUES: (place, value, content). Of long lists the first only."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, inner in list(items)[: 2 if len(content) > 20 else None]:
        for value in VALUES:
            whole = copy.copy(content)
            whole[key] = value
            yield (*place, key), value, whole
        if isinstance(inner, dict | list):
            for below, value, part in changed(inner, (*place, key)):
                whole = copy.copy(content)
                whole[key] = part
                yield below, value, whole


def said_of(read: Callable[[], object]) -> str:
    """The message of one of our errors; empty without an error."""
    try:
        read()
    except (DataError, CheckpointError, NotAccelerated) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("config", [LLAMA, BLOOM, GPT2], ids=lambda config: str(config["model_type"]))
def test_any_value_in_config_json_is_read_or_named(config: dict[str, Any]) -> None:
    assert said_of(lambda: config_of(config, "config.json")) == ""
    for place, value, given in changed(config):
        said = said_of(partial(config_of, given, "config.json"))
        assert len(said) < 500
        # what is accepted may be of the type, or is an absent value
        assert said.startswith("config.json") or value in (None, {}, {"a": 1}) or isinstance(value, int | float), place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "48"}, "hidden_size='48' must be an integer; copy the model's own config.json there"),
        ({"num_attention_heads": 4.0}, "num_attention_heads=4.0 must be an integer"),
        ({"vocab_size": True}, "vocab_size=True must be an integer"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "rope_scaling: factor='8' must be a number"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type=3 must be text"),
        ({"model_type": ["llama"]}, "has model_type=['llama']; only"),
    ],
)
def test_the_value_and_the_rule_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(LLAMA | change, "config.json")
    assert said in str(caught.value)


def test_any_value_in_a_tokenizers_files_is_read_or_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    job = ChatJob(inputs=("chats.jsonl",), output_prefix="out", tokenizer=str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        original = (tmp_path / name).read_text(encoding="utf-8")
        cases = [given for _, value, given in changed(json.loads(original)) if value in (None, -1, "48", [{}])]
        for given in [*VALUES, *cases]:
            (tmp_path / name).write_text(json.dumps(given), encoding="utf-8")
            for read in (
                lambda: accelerate(build_tokenizer("HFTokenizer", str(tmp_path))).encode("the sum"),
                lambda: check_tokenizer(tmp_path, 1000),
                lambda: special_token_ids(tmp_path),
                lambda: job.encoder(),
            ):
                assert len(said_of(read)) < 1000
        (tmp_path / name).write_text(original, encoding="utf-8")


def test_a_vocabulary_of_text_is_named(tmp_path: Path) -> None:
    for content in ({"model": "BPE"}, {"model": {"vocab": {"a": "0"}}}, {"added_tokens": [{"id": 0}]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.json (is not a tokenizer\.json|gives the token 'a' the id)"
        ):
            check_tokenizer(tmp_path, 10)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


@pytest.mark.filterwarnings("error")  # nothing is printed beside the refusal
@pytest.mark.parametrize("protocol", [2, 4])
def test_torchs_advice_to_open_a_hostile_file_without_a_check_is_not_repeated(
    protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "pickle": pickle.dumps({"a": Hostile()}, protocol),
        "another opcode": b"\x80\x02(ios\nmkdir\n.",
        "a persistent id": b"\x80\x02(X\x01\x00\x00\x00aPfoo\n.",
        "no pickle": b"not a pickle",
    }
    for content in contents.values():
        Path("pytorch_model.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (is refused|cannot be read)") as caught:
            ForeignFiles().load(Path("pytorch_model.bin"))
        assert "weights_only" not in str(caught.value)
        assert "torch.load" not in str(caught.value)
    torch.save({"a": Hostile()}, "pytorch_model.bin", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is refused") as caught:
        ForeignFiles().load(Path("pytorch_model.bin"))
    assert "weights_only" not in str(caught.value)
    assert not Path("hostile").exists()
