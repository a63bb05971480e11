"""Tokenizer of chats: ids with the span of each in the text, and the copy of the tokenizer for training.

Special tokens in the text become their ids, since templates write them as text. Nothing else is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.data.chat.template import TEMPLATE_NAME, TOOL_TEMPLATE_NAME, TemplateSource
from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.acceleration import AcceleratedTokenizer, NotAccelerated, accelerate, check_equal
from megatron.data.tokenizers.base import CONFIG_NAME, KNOWN_EOD_TOKENS, named_tokens, read_config, refusal
from megatron.data.tokenizers.library import GPT2BPETokenizer, HFTokenizer, LibraryTokenizer
from megatron.runtime.files import replacing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
PROOF_CHARACTERS = 1 << 14
"""Length of text on which gigatoken is compared before it is used."""
BYTES_WORTH_GIGATOKEN = 1 << 21
"""Length of text above which gigatoken is used: loading it takes as long as encoding this much."""

Bytes = NDArray[np.int64]


class EncodedText(NamedTuple):
    """Tokens of texts, concatenated."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    """Tokens of each text."""
    starts: NDArray[np.int64]
    """Start of each token's text, in bytes or characters from the start of the first text."""
    ends: NDArray[np.int64]
    bases: NDArray[np.int64]
    """Start of each text, in the same unit."""
    is_bytes: bool
    """Unit of starts, ends and bases: bytes, else characters."""


class ChatTokenizer:
    """A tokenizer of the `tokenizers` library for text that a template wrote. Raises DataError."""

    def __init__(self, reference: LibraryTokenizer, content: bytes, tokens: dict[str, str], origin: str):
        """`content`: its tokenizer.json. `tokens`: eos_token and others by name. `origin`: its file, for messages."""
        self.content = content
        self.origin = origin
        self.tokens = dict(tokens)
        """Texts of bos_token, eos_token, ..."""
        self._reference = reference
        self._inner = reference._inner
        self.vocab_size = reference.vocab_size
        self.eos_id = reference.eod
        # a tuple, for str.endswith
        added = self._inner.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)
        described = orjson.loads(content)
        if described["pre_tokenizer"]:
            from tokenizers import processors

            # a post-processor may exclude the space before a word from the offsets of its token
            self._inner.post_processor = processors.Sequence([])
        # bytes of each id, [vocabulary]: the spans of tokens are then sums, and no offsets are needed
        self._byte_counts = _byte_counts(described, self.vocab_size)
        self._fast: AcceleratedTokenizer | None = None
        # without fixed byte counts gigatoken cannot be used, so there is nothing to prove
        self._is_proven = self._byte_counts is None
        self._num_characters = 0
        self.expected_bytes = 0
        """Estimate of the text to come: gigatoken encodes a long one from the start."""

    @property
    def identity(self) -> dict[str, Any]:
        return self._reference.identity

    def without_token(self, markers: Sequence[str]) -> list[str]:
        """Return the markers that are encoded as other text is, in several tokens."""
        added = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        return [marker for marker in markers if marker not in added]

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)

    def encode(self, texts: Sequence[str]) -> EncodedText:
        """Raises DataError for a text that cannot be encoded."""
        encoded = None
        # None from _encode_bytes: bytes were lost or added, as by an unknown character; the library's offsets are
        # right then too
        if self._byte_counts is not None:
            encoded = self._encode_bytes(texts, self._byte_counts)
        return encoded or self._encode_characters(texts)

    def _encode_bytes(self, texts: Sequence[str], counts: Bytes) -> EncodedText | None:
        """Encode with spans from the byte count of each token, exact within characters; None if the sum is wrong."""
        self._num_characters += sum(map(len, texts))
        if not self._is_proven and max(self.expected_bytes, self._num_characters) > BYTES_WORTH_GIGATOKEN:
            self._prove(texts)
        ids, lengths = (self._fast or self._reference).encode_batch(texts)
        ends = np.cumsum(counts[ids])
        # UTF-8, as byte-level tokenizers count
        sizes = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
        text_ends = np.cumsum(sizes)
        # offset after the last token of each text; the 0 in front is that of texts before the first token
        reached = np.concatenate([[0], ends])[np.cumsum(lengths)]
        if not np.array_equal(reached, text_ends):
            return None
        return EncodedText(ids.astype(np.int32), lengths, ends - counts[ids], ends, text_ends - sizes, True)

    def _prove(self, texts: Sequence[str]) -> None:
        """Use gigatoken if it gives the library's ids on the first texts."""
        self._is_proven = True
        # the user's own texts: whether ids are equal depends on the languages and markers in them
        sample, left = [], PROOF_CHARACTERS
        for text in texts:
            sample.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
        try:
            fast = accelerate(self._reference)
            check_equal(fast, self._reference, sample)
        except NotAccelerated:
            return
        self._fast = fast

    def _encode_characters(self, texts: Sequence[str]) -> EncodedText:
        """Encode with the library's character offsets, which account for a normalizer."""
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, or TypeError
            raise refusal(texts, error) from error
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        bases = np.cumsum(sizes) - sizes
        lengths = np.fromiter(map(len, encodings), np.int64, len(texts))
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        spans = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
        # an empty array in front: there may be no texts
        all_ids = np.concatenate([np.empty(0, np.int32), *ids])
        starts, ends = np.concatenate([np.empty((0, 2), np.int64), *spans]).T + np.repeat(bases, lengths)
        return EncodedText(all_ids, lengths, starts, ends, bases, False)

    def eos_of_text(self) -> str:
        """Return the text that becomes the EOS id. Raises DataError if there is none."""
        eos = self.tokens.get("eos_token")
        if eos is None or self.eos_id is None:
            raise DataError(
                f"the tokenizer {self.origin} has no end-of-sequence token, with which the model learns to end its "
                f'turns; name it in {CONFIG_NAME}: "eos_token": "</s>", or choose a template that ends turns itself'
            )
        return eos


def load_tokenizer(
    path: str, source_tokens: dict[str, str] | None = None, wanted: Sequence[str] = ()
) -> tuple[ChatTokenizer, tuple[str, ...]]:
    """Return the tokenizer of a tokenizer.json or its folder, and those of the `wanted` tokens that were added.

    `source_tokens` are bos_token, eos_token and pad_token of a template's file. Raises DataError.
    """
    file, reference, content = _open(Path(path))
    inner = reference._inner
    tokens = named_tokens(read_config(file.parent))
    if "eos_token" not in tokens:
        tokens |= _usual_eos(inner)
    # the template's file goes before the tokenizer's config: its markers end the turns
    tokens |= source_tokens or {}
    eos = tokens.get("eos_token")
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    # a token may be in the vocabulary and yet not be parsed in text: it has to be among the added ones
    new = [token for token in dict.fromkeys(wanted) if token not in added]
    lacking = tuple(token for token in new if inner.token_to_id(token) is None)
    is_parsed = eos in added or eos in new
    if eos is not None and not is_parsed and inner.token_to_id(eos) is not None:
        new.append(eos)  # in the vocabulary, but not parsed in text
    _check_in_vocabulary(inner, tokens, new, file)
    if new:
        inner.add_special_tokens(new)
        content = inner.to_str().encode()
    eos_id = None if eos is None else inner.token_to_id(eos)
    # the identity of a tokenizer is that of its content and its EOD
    if new or eos_id != reference.eod:
        reference = LibraryTokenizer("HFTokenizer", (content,), inner, eos_id, True)
    return ChatTokenizer(reference, content, tokens, str(file)), lacking


def _check_in_vocabulary(inner: Tokenizer, tokens: Mapping[str, str], new: Sequence[str], file: Path) -> None:
    """Raise DataError for a BOS or EOS that the tokenizer lacks, which a template would write as plain text."""
    for name in ("bos_token", "eos_token"):
        token = tokens.get(name)
        if token is None or token in new or inner.token_to_id(token) is not None:
            continue
        raise DataError(
            f"{name} {token!r} is not in the vocabulary of {file}; add it with --add-special-tokens, or name another "
            f"in {CONFIG_NAME}"
        )


def _usual_eos(inner: Tokenizer) -> dict[str, str]:
    """Return the EOS token by its usual names, for a tokenizer whose config names none."""
    for token in KNOWN_EOD_TOKENS:
        if inner.token_to_id(token) is not None:
            return {"eos_token": token}
    return {}


def _open(path: Path) -> tuple[Path, LibraryTokenizer, bytes]:
    """Return the file, the tokenizer and its tokenizer.json. Raises DataError."""
    remedy = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes it"
    if path.is_dir() and not (path / TOKENIZER_NAME).is_file():
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            reference = GPT2BPETokenizer(path / "vocab.json", path / "merges.txt", parse_special_tokens=True)
            return path / "vocab.json", reference, reference.to_json().encode()
        raise DataError(f"{path} holds no {TOKENIZER_NAME}; chats need the tokenizer in that format: {remedy}")
    if path.suffix in (".model", ".tiktoken"):
        raise DataError(
            f"{path} is not a {TOKENIZER_NAME}; chats need special tokens and character offsets, which only that "
            f"format has: {remedy}"
        )
    file = path / TOKENIZER_NAME if path.is_dir() else path
    return file, HFTokenizer(file, parse_special_tokens=True), file.read_bytes()


def _byte_counts(described: dict[str, Any], vocab_size: int) -> Bytes | None:
    """Return the bytes of text of each id; None if some tokens are not a fixed stretch of text."""
    model, added = described["model"], described["added_tokens"]
    is_fixed = (
        described["normalizer"] is None
        and _is_bytes_unchanged(described["pre_tokenizer"])
        and _is_bpe_of_bytes(model)
        # these take the white space beside them, however much it is
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not is_fixed:
        return None
    counts = np.zeros(vocab_size, np.int64)
    vocab = model["vocab"]
    numbers = np.fromiter(vocab.values(), np.int64, len(vocab))
    counts[numbers] = np.fromiter(map(len, vocab), np.int64, len(vocab))  # one character a byte
    # an added token is its own text, whatever the vocabulary's alphabet is
    for token in added:
        counts[token["id"]] = len(token["content"].encode())
    return counts


def _is_bytes_unchanged(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return true for splits that keep all text, and then ByteLevel, which writes a byte as one character."""
    steps = pre_tokenizer or {"type": "none"}
    # a sequence, or a single step as a sequence of one
    *splits, last = steps.get("pretokenizers", [steps])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    return all(map(_keeps_all, splits))


def _keeps_all(split: dict[str, Any]) -> bool:
    return split["type"] == "Split" and (split["behavior"] != "Removed" or split["invert"])


def _is_bpe_of_bytes(model: dict[str, Any]) -> bool:
    from tokenizers import pre_tokenizers

    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    # a byte without a token would become <unk>, or nothing
    return set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()


def ids_before_text(tokenizer: ChatTokenizer) -> NDArray[np.int32]:
    """Return the ids that the tokenizer's own post-processor puts before a text: those of BOS, or none."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_str(tokenizer.content.decode())
    # from the stored content: the post-processor of the loaded one is emptied for exact offsets
    plain, full = (whole.encode("a", add_special_tokens=added).ids for added in (False, True))
    begin = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return np.array(full[:begin], np.int32)


def files_to_write(tokenizer: ChatTokenizer, original: str, source: TemplateSource) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json and chat_template.jinja for AutoTokenizer."""
    origin = Path(original)
    config = read_config(origin if origin.is_dir() else origin.parent)
    # AutoTokenizer's choice where it has no model's config.json to choose by, as in this folder
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for name, token in tokenizer.tokens.items():
        config[name] = token
    config["chat_template"] = source.text
    contents = {
        TOKENIZER_NAME: tokenizer.content.decode(),
        TEMPLATE_NAME: source.text,
        CONFIG_NAME: json.dumps(config, ensure_ascii=False, indent=2) + "\n",
    }
    if source.tool_use is not None:
        contents[TOOL_TEMPLATE_NAME] = source.tool_use
    return contents


def write_tokenizer(folder: str, tokenizer: ChatTokenizer, original: str, source: TemplateSource) -> None:
    """Write a tokenizer and its template, in place of one that is there. Raises OSError."""
    target, files = Path(folder), files_to_write(tokenizer, original, source)
    if TOOL_TEMPLATE_NAME not in files:
        # one that is there is of an earlier tokenizer
        (target / TOOL_TEMPLATE_NAME).unlink(missing_ok=True)
    # each by a rename: a reader never finds half a file
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(target / name) as file:
            file.write(content.encode())
