"""Training of a byte-level BPE tokenizer, GPT-2's kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import END_OF_TEXT, check_replaced
from megatron.runtime.files import replacing


def train_tokenizer(texts: Iterator[str], vocab_size: int, min_frequency: int) -> dict[str, str]:
    """Return the files of a tokenizer, by name. The same texts give the same files.

    The vocabulary has at most `vocab_size` entries, END_OF_TEXT the last, as in GPT-2. Raises DataError without text.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    # END_OF_TEXT is added afterwards: as a special token of the trainer it would be the first
    # every byte is in the alphabet, also those that these texts lack, so that any later text can be encoded
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without END_OF_TEXT
        min_frequency=min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = learned["vocab"]
    merges: list[tuple[str, str]] = [tuple(pair) for pair in learned["merges"]]
    # bytes alone would be a tokenizer, but one that learnt nothing
    if not merges:
        raise DataError("--input has nothing to learn from; give text that is not empty")
    vocab[END_OF_TEXT] = len(vocab)

    finished = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    finished.pre_tokenizer = byte_level
    finished.decoder = decoders.ByteLevel()
    finished.add_special_tokens([END_OF_TEXT])
    config = {
        "tokenizer_class": "GPT2TokenizerFast",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    by_id = dict(sorted(vocab.items(), key=lambda item: item[1]))
    return {
        "vocab.json": json.dumps(by_id, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges),
        "tokenizer.json": finished.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def write_tokenizer(files: dict[str, str], folder: Path, *, overwrite: bool = False) -> None:
    """Write the files of a tokenizer, each in one piece. Raises OSError; DataError if they would replace others."""
    check_replaced(folder, files, "--output-dir", overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replacing(folder / name) as file:
            file.write(content.encode())
