"""Text to token ids and back, behind one face and under the names Megatron's users know.

Documents are plain text: a literal `<|endoftext|>` in one is encoded as those thirteen characters, never as the
special id. No beginning- or end-of-text ids are added; the end-of-document id is the caller's to append.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
KNOWN_EOD_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document. None: the tokenizer has none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class _LibraryTokenizer:
    """What GPT2BPETokenizer and HFTokenizer share: the `tokenizers` library does the work."""

    def __init__(self, inner: tokenizers.Tokenizer, eod: int | None):
        self._inner = inner
        self.eod = eod
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        # the fast variant leaves out character offsets; ids are the same
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt. Raises DataError."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        vocab = _read_vocab(Path(vocab_file))
        merges = _read_merges(Path(merge_file))
        # without all of them some text would silently vanish
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
        if missing:
            raise DataError(
                f"{vocab_file} lacks {len(missing)} of the 256 byte symbols, such as {missing[0]!r}; it is no "
                "byte-level BPE vocabulary, use the vocab.json that belongs to the merges"
            )
        try:
            inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{merge_file} does not fit {vocab_file}: {error}; use two files of the same tokenizer"
            ) from error
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        super().__init__(inner, vocab.get(END_OF_TEXT))


def _read_vocab(path: Path) -> dict[str, int]:
    content = _read_json(path, "a vocab.json, an object of token: id")
    if not isinstance(content, dict) or not content or not all(type(i) is int and i >= 0 for i in content.values()):
        raise DataError(f"{path} is no vocab.json; it must be a JSON object of token: id")
    return content


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read_text(path, "a merges.txt").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(f"{path}:{number}: {line[:80]!r} is no pair of tokens; give a merges.txt")
        merges.append((pair[0], pair[1]))
    return merges


class HFTokenizer(_LibraryTokenizer):
    """A tokenizer.json, or the folder that holds one. Raises DataError.

    eod is `eos_token` of the tokenizer_config.json beside it, else the first of KNOWN_EOD_TOKENS that it knows.
    """

    def __init__(self, path: str | Path):
        import tokenizers

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        content = _read_text(file, "a tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{file} is no tokenizer.json ({error}); give the file of that name, or its folder"
            ) from error
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # as text
        super().__init__(inner, _eod_of(inner, file.with_name("tokenizer_config.json")))


def _eod_of(inner: tokenizers.Tokenizer, config_path: Path) -> int | None:
    if config_path.is_file():
        config = _read_json(config_path, "a tokenizer_config.json")
        name = config.get("eos_token") if isinstance(config, dict) else None
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str):
            named: int | None = inner.token_to_id(name)
            if named is None:
                raise DataError(
                    f"{config_path} names eos_token {name!r}, which the tokenizer.json beside it does not know; "
                    "use two files of the same tokenizer"
                )
            return named
    known = (inner.token_to_id(name) for name in KNOWN_EOD_TOKENS)
    return next((i for i in known if i is not None), None)


class SentencePieceTokenizer:
    """A SentencePiece .model. Raises DataError."""

    def __init__(self, path: str | Path):
        import sentencepiece

        content = _read_bytes(Path(path), "a SentencePiece model")
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # RuntimeError, or what protobuf raises
            raise DataError(f"{path} is no SentencePiece model ({error}); give a .model file") from error
        self.vocab_size: int = self._inner.get_piece_size()
        eos: int = self._inner.eos_id()
        self.eod = None if eos < 0 else eos

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array(ids, dtype=np.int32) for ids in self._inner.encode(list(texts), out_type=int, num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids])
        return text


class NullTokenizer:
    """Text that is already ids, apart by white space: for data prepared elsewhere. eod is the last id."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod: int | None = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads ids apart by white space: {error}") from None
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise DataError(f"id {wrong} is outside vocab_size={self.vocab_size}; enlarge it, or correct the text")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


ALIASES = {"HuggingFaceTokenizer": "HFTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
TOKENIZER_TYPES = ("GPT2BPETokenizer", "HFTokenizer", "SentencePieceTokenizer", "NullTokenizer", *ALIASES)


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer of that name, from the files it needs. Raises DataError."""
    kind = ALIASES.get(tokenizer_type, tokenizer_type)
    if kind == "GPT2BPETokenizer":
        if not (vocab_file and merge_file):
            raise DataError("GPT2BPETokenizer needs --vocab-file and --merge-file: vocab.json and merges.txt")
        return GPT2BPETokenizer(vocab_file, merge_file)
    if kind == "NullTokenizer":
        if not vocab_size or vocab_size < 1:
            raise DataError("NullTokenizer needs --vocab-size: one more than the largest id")
        return NullTokenizer(vocab_size)
    if kind not in TOKENIZER_TYPES:
        raise DataError(f"tokenizer_type={tokenizer_type} is unknown; use one of {', '.join(TOKENIZER_TYPES)}")
    if not tokenizer_model:
        what = "a tokenizer.json or its folder" if kind == "HFTokenizer" else "a SentencePiece .model"
        raise DataError(f"{tokenizer_type} needs --tokenizer-model: {what}")
    return HFTokenizer(tokenizer_model) if kind == "HFTokenizer" else SentencePieceTokenizer(tokenizer_model)


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give {what}") from error
    if not content:
        raise DataError(f"{path} is empty; give {what}")
    return content


def _read_text(path: Path, what: str) -> str:
    try:
        return _read_bytes(path, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text (byte {error.start}); give {what}") from None


def _read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(_read_text(path, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is no JSON ({error}); give {what}") from None
