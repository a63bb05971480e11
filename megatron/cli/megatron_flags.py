"""Flags of Megatron's tools/preprocess_data.py that this project does not have, with the reason or what to use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_TRIAL = "there is nothing to search for: threads share one tokenizer; use --workers, by default all cores"
_VOCABULARY = "a dataset does not depend on it; give it to the training"
_SENTENCES = "sentences are for BERT and T5; BLOOM and Llama train on whole documents"
REFUSED = {
    "--split-sentences": _SENTENCES,
    "--lang": _SENTENCES,
    "--find-optimal-num-workers": _TRIAL,
    "--workers-to-check": _TRIAL,
    "--performance-dir": _TRIAL,
    "--use-gigatoken": "the fast tokenizer is always used where its ids are equal; --reference-tokenizer disables it",
    "--null-tokenizer-eod-id": "use --eod-token ID",
    "--null-tokenizer-pad-id": "documents are not padded",
    "--tokenizer-hf-no-include-special-tokens": "use --no-prepend-bos",
    "--tokenizer-hf-no-use-fast": "a tokenizer.json is needed, which AutoTokenizer's save_pretrained writes",
    "--trust-remote-code": "code that comes with a tokenizer is never run; use a tokenizer.json",
    "--tokenizer-metadata": "the type is given by --tokenizer-type, the files by --tokenizer-model",
    "--tokenizer-special-tokens": "special tokens are those of the tokenizer's files; add them there",
    "--tiktoken-special-tokens": "they have Megatron's default names, in ids below --tiktoken-num-special-tokens",
    "--tokenizer-sentencepiece-legacy": "add tokens to the .model itself, as user-defined pieces",
    "--tokenizer-sentencepiece-ignore-extra-whitespaces": "the .model's own rule for white space is followed",
    "--vocab-extra-ids": "they are T5's",
    "--padded-vocab-size": _VOCABULARY,
    "--pad-vocab-size": _VOCABULARY,
    "--make-vocab-size-divisible-by": _VOCABULARY,
    "--seq-length": "documents keep their length; the training cuts them into samples",
}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Exits with a message, which says what to do about those of Megatron that are refused."""
    arguments, unknown = parser.parse_known_args(argv)
    names = [word.partition("=")[0] for word in unknown]
    reasons = [f"{name} is not supported: {REFUSED[name]}" for name in dict.fromkeys(names) if name in REFUSED]
    if reasons:
        parser.error("\n  ".join(reasons))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments
