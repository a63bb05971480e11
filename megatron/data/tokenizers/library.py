"""Tokenizers of the `tokenizers` library: GPT-2's files, and tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers import base

if TYPE_CHECKING:
    import tokenizers


class LibraryTokenizer(base.Tokenizer):
    """Base of the tokenizers that the `tokenizers` library implements."""

    def __init__(self, kind: str, contents: Sequence[bytes], inner: tokenizers.Tokenizer, eod: int | None, parse: bool):
        """`parse`: literal special tokens become their ids."""
        super().__init__(kind, *contents, base.option_bytes("parse_special_tokens", parse))
        inner.encode_special_tokens = not parse  # i.e. as plain text
        self._inner = inner
        self.parse_special_tokens = parse
        self.eod = eod
        # by the largest id, not by the number of tokens: ids may have gaps
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    def encode_plain(self, texts: Sequence[str]) -> base.TokenBatch:
        try:
            # the fast variant leaves out character offsets; ids are the same
            # add_special_tokens=False: what the file puts around a text is `template`, and added by `surrounded`
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, or TypeError
            raise base.refusal(texts, error) from error
        return base.end_to_end([np.array(encoding.ids, dtype=np.int32) for encoding in encodings], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        number: int | None = self._inner.token_to_id(token)
        return number

    @property
    def special_ids(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return super().special_ids.union(number for number, token in added.items() if token.special)

    def to_json(self) -> str:
        """Return the content of its tokenizer.json."""
        content: str = self._inner.to_str()
        return content


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt. Raises DataError."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path, parse_special_tokens: bool = False):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        vocab_content = base.read_bytes(Path(vocab_file), "a vocab.json, an object of token: id")
        merge_content = base.read_bytes(Path(merge_file), "a merges.txt")
        vocab = _parse_vocab(Path(vocab_file), vocab_content)
        merges = _parse_merges(Path(merge_file), merge_content)
        # text of a missing byte would silently disappear
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
        if missing:
            raise DataError(
                f"{vocab_file} lacks {len(missing)} of the 256 byte symbols, such as {missing[0]!r}; it is not a "
                "byte-level BPE vocabulary, use the vocab.json that belongs to the merges"
            )
        try:
            inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{merge_file} does not fit {vocab_file}: {error}; use two files of the same tokenizer"
                f"{base.looks_like(merge_content, 'a merges.txt')}"
            ) from error
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        # the library would give one that the vocabulary lacks a new id, which the model has no row for
        if parse_special_tokens and base.END_OF_TEXT in vocab:
            inner.add_special_tokens([base.END_OF_TEXT])
        contents = (vocab_content, merge_content)
        super().__init__("GPT2BPETokenizer", contents, inner, vocab.get(base.END_OF_TEXT), parse_special_tokens)
        self.bos = self.eod  # as in GPT-2's own configuration


def _parse_vocab(path: Path, content: bytes) -> dict[str, int]:
    vocab = base.parse_json(path, content, "a vocab.json, an object of token: id")
    if not isinstance(vocab, dict) or not vocab or not all(type(i) is int and i >= 0 for i in vocab.values()):
        raise DataError(
            f"{path} is not a vocab.json; it must be a JSON object of token: id"
            f"{base.looks_like(content, 'a vocab.json')}"
        )
    return vocab


def _parse_merges(path: Path, content: bytes) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(base.decode_utf8(path, content, "a merges.txt").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is not a pair of tokens; give a merges.txt"
                f"{base.looks_like(content, 'a merges.txt')}"
            )
        merges.append((pair[0], pair[1]))
    return merges


class HFTokenizer(LibraryTokenizer):
    """A tokenizer.json, or the folder that holds one. Raises DataError.

    eod is `eos_token` of the tokenizer_config.json beside it, else the first of KNOWN_EOD_TOKENS in its vocabulary;
    bos is `bos_token`. What the file's post-processor puts around a text is the template; transformers adds the same,
    whatever `add_bos_token` says in tokenizer_config.json.
    """

    def __init__(self, path: str | Path, parse_special_tokens: bool = False):
        import tokenizers

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        content = base.read_bytes(file, "a tokenizer.json, or the folder that holds one")
        try:
            inner = tokenizers.Tokenizer.from_str(base.decode_utf8(file, content, "a tokenizer.json"))
        except (DataError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library raises plain Exception, and its panics are not even that
            raise DataError(
                f"{file} is not a tokenizer.json ({error}); give the file of that name, or its folder"
                f"{base.looks_like(content, 'a tokenizer.json')}"
            ) from error
        # a tokenizer.json may hold both, as last set before it was saved: documents would be cut in silence
        inner.no_truncation()
        inner.no_padding()
        names = base.named_tokens(base.read_config(file.parent))
        eod = _id_of(inner, names, "eos_token", file)
        if eod is None:
            known = [number for number in map(inner.token_to_id, base.KNOWN_EOD_TOKENS) if number is not None]
            eod = known[0] if known else None
        super().__init__("HFTokenizer", (content,), inner, eod, parse_special_tokens)
        self.bos = _id_of(inner, names, "bos_token", file)
        self.template = _template_of(inner, file)


def _id_of(inner: tokenizers.Tokenizer, names: Mapping[str, str], role: str, file: Path) -> int | None:
    """Return the id of the token that tokenizer_config.json names for `role`; None if it names none."""
    if role not in names:
        return None
    number: int | None = inner.token_to_id(names[role])
    if number is None:
        raise DataError(
            f"{file.with_name(base.CONFIG_NAME)} names {role} {names[role]!r}, which the tokenizer.json beside it does "
            "not know; use two files of the same tokenizer"
        )
    return number


def _template_of(inner: tokenizers.Tokenizer, file: Path) -> base.Added:
    """Return what the post-processor puts around a text, seen on a short one. Raises DataError if it does more."""
    if inner.post_processor is None:
        return base.Added()
    # a small vocabulary may have no token for "x"
    texts = ("x", *inner.get_vocab())
    text = next((text for text in texts if inner.encode(text, add_special_tokens=False).ids), "")
    plain = inner.encode(text, add_special_tokens=False).ids
    full = inner.encode(text, add_special_tokens=True).ids
    # where the text's own ids lie in the others; all else is what was put around them
    for start in range(len(full) - len(plain) + 1):
        end = start + len(plain)
        if full[start:end] == plain:
            return base.Added(tuple(full[:start]), tuple(full[end:]))
    raise DataError(f"{file} has a post-processor that changes the ids of a text; use one that only adds tokens")
