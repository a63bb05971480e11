"""What a fine-tuning begins with, tiny: a Llama as transformers writes it, its tokenizer, and chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.index.indexed_builder import IndexedDatasetBuilder

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
REQUIRED: dict[str, Any] = {
    "model_path": "model",
    "data_path": "chats.jsonl",
    "ckpt_output_dir": "out",
    "data_output_dir": "data",
    "max_seq_len": 128,
    "max_batch_len": 512,
    "effective_batch_size": 16,
    "learning_rate": 1e-5,
}
"""The TrainingArgs that have no default; the files need not be there."""


def write_tokens(prefix: Path) -> str:
    """A dataset of two documents of four tokens, for launches that do not come to train."""
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.add_document(np.arange(4, dtype=np.int32))
        builder.add_document(np.arange(4, dtype=np.int32))
        builder.finalize()
    return str(prefix)


def write_config(folder: Path) -> Path:
    """What a plan reads of such a Llama: config.json and the name of a file of weights, without transformers."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 278,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def write_model(folder: Path, **changed: Any) -> Path:
    """A Llama of two layers. `changed` goes into its config."""
    transformers = pytest.importorskip("transformers")
    import torch

    vocab_size = write_tokenizer(folder)
    torch.manual_seed(0)
    config = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**(config | changed))).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> int:
    """A tokenizer of bytes and a few merges, with a chat template; the size of its vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is the sum of the numbers? it is the sum."] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size: int = tokenizer.get_vocab_size()
    return size


def write_chats(path: Path, count: int = 40) -> Path:
    """Questions and answers of some 70 tokens, a chat a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} plus {number}? Think well."},
                {"role": "assistant", "content": f"It is {2 * number}, of course, my dear friend" + "!" * (number % 9)},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
