"""A small model with tokenizer and chat template, and commands of megatron.generate on the ranks of tests/ranks.py."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron.generate import run
from megatron.generation.loading import load_model
from megatron.generation.options import read_command
from megatron.generation.saved_model import parallel_options
from megatron.parallel.context import ParallelContext

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def write_tokenizer(folder: Path, special: Sequence[str] = SPECIAL) -> None:
    """A byte-level BPE without merges: each id is a byte, and these special tokens, the first of which ends a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(
    folder: Path, kind: Literal["llama", "bloom", "gpt2"] = "llama", special: Sequence[str] = SPECIAL
) -> Path:
    """A model of two layers, written by transformers, that repeats nothing. GPT-2 has 32 positions."""
    import torch
    import transformers

    shared: dict[str, Any] = {"vocab_size": 264, "hidden_size": 32, "initializer_range": 0.4, "pad_token_id": None}
    shared |= {"bos_token_id": None, "eos_token_id": 256}
    config: transformers.PretrainedConfig
    if kind == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=512, **shared,
        )  # fmt: skip
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_positions=32, **shared)
    else:
        config = transformers.BloomConfig(n_layer=2, n_head=4, **shared)
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, special)
    return folder


def generate(arguments: list[str], device: str = "cpu") -> tuple[str, str]:
    """Run a command in this rank; return what it prints on stdout and stderr."""
    command, _ = read_command([*arguments, "--device", device])
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        ctx = ParallelContext.build(parallel_options(command.load), device)
        run(command, load_model(command.load, ctx))
    return out.getvalue(), errors.getvalue()
