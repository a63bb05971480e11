"""The lengths of samples that the benchmarks of packing and bucketing share: two drawn, one of real chats."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.tokenizers.build import build_tokenizer

DISTRIBUTIONS = ("lognormal", "uniform", "real")
CAPACITY = 4096
"""The longest sample of the drawn ones, and the row they are packed into."""
MEAN_TOKENS = 665
SIGMA = 1.0


def test_data() -> Path | None:
    """The folder of real text, where the tests have one."""
    folder = os.environ.get("MEGATRON_TEST_DATA")
    return Path(folder).resolve() if folder else None


def chat_lengths(data: Path) -> NDArray[np.int64]:
    """Tokens of each chat of sft_messages.jsonl, roles and turns included, by GPT-2's tokenizer."""
    tokenizer = build_tokenizer("HFTokenizer", str(data / "tokenizers" / "gpt2"))
    with open(data / "sft_messages.jsonl", encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    texts = ["".join(f"<|{turn['role']}|>\n{turn['content']}\n" for turn in chat) for chat in chats]
    return np.asarray(tokenizer.encode_batch(texts).lengths, dtype=np.int64)


def draw(distribution: str, count: int, generator: np.random.Generator, longest: int = CAPACITY) -> NDArray[np.int64]:
    """Lengths from 1 to `longest`. The real ones are drawn from the chats, again and again."""
    if distribution == "lognormal":
        mu = np.log(MEAN_TOKENS) - SIGMA**2 / 2
        return np.clip(generator.lognormal(mu, SIGMA, count), 1, longest).astype(np.int64)
    if distribution == "uniform":
        return generator.integers(1, longest + 1, count)
    data = test_data()
    if data is None:
        raise SystemExit("MEGATRON_TEST_DATA must name the folder of sft_messages.jsonl and tokenizers/")
    return np.minimum(generator.choice(chat_lengths(data), count), longest)


def available() -> tuple[str, ...]:
    """All of DISTRIBUTIONS, but for the real one where there is no folder of real text."""
    return DISTRIBUTIONS if test_data() else DISTRIBUTIONS[:-1]
