"""InstructLab's data processing: messages to tokenized samples with a loss mask, once, before the training.

    from megatron.api import DataProcessArgs, data_process as dp
    dp.main(DataProcessArgs(data_path="chats.jsonl", data_output_path="data", max_seq_len=4096, model_path="model"))

The folder then holds data.bin, data.idx, data_loss_mask.bin and data_loss_mask.idx (docs/reference/instructlab.md),
tokenizer/, and data.json with the digests of their inputs: the same call, made again or on another node that shares the
folder, uses what is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron.data.chat.encoder import TooLong
from megatron.data.chat.preprocessing import ChatJob, ChatTotals, preprocess_chats
from megatron.data.chat.template import find_template
from megatron.data.chat.tokenizer import write_tokenizer
from megatron.data.index.checksums import file_sha256
from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, best_dtype
from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.preference.preprocessing import SEQUENCES, PreferenceJob, preprocess_preferences
from megatron.data.prepare.manifest import read_manifest
from megatron.data.tokenizers.base import named_tokens, read_config
from megatron.launch.instructlab.arguments import DataProcessArgs
from megatron.launch.plan import FineTuning
from megatron.options.data import parse_data_path
from megatron.options.types import TrainOn
from megatron.runtime.files import parse_json, replacing

logger = logging.getLogger("megatron.api")

NAME = "data"
TOKENIZER_NAME = "tokenizer.json"
SHORTEST_SAMPLE = 20
"""InstructLab leaves out samples of fewer tokens as broken."""
# the files that ids, special tokens and the template come from: a change of one makes other samples
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "additional_chat_templates/tool_use.jinja",
)
MOCK_STEPS = 4
"""Global batches in an epoch of mock data."""
BATCH_DOCUMENTS = 1000
"""Documents that are tokenized at one time."""


@dataclass(frozen=True)
class Samples:
    """A processed dataset."""

    prefix: str
    num_samples: int
    longest: int
    """Tokens of the longest sample."""
    vocab_size: int | None
    """Tokens of the tokenizer and the template. None: unknown, because the dataset was made by other means."""
    tokenizer: str | None
    """Folder of the tokenizer that the trained model goes with. None: the model's own."""
    outcomes: Mapping[str, int]
    """Rows or samples that were changed or left out, by what happened to them."""
    unit: str = "chats"

    def describe(self) -> str:
        """Return one line for the user."""
        text = f"{self.num_samples} {self.unit} in {self.prefix}, {self.longest} tokens at most"
        return text + "".join(f"; {name}: {count:,}" for name, count in self.outcomes.items())


def main(args: DataProcessArgs) -> None:
    """Tokenize the chats of a file, or of several. Raises DataError for what cannot be read, encoded or written."""
    set_up_logging("INFO")
    for file, folder in output_folders(args.data_path, args.data_output_path):
        process_data(**args.model_dump() | {"data_path": file, "data_output_path": folder})


def output_folders(data_path: str | Sequence[str | float], folder: str) -> list[tuple[str, str]]:
    """Return each file, and the folder of its dataset. Raises DataError for a list that cannot be read."""
    given = FineTuning.of("", data_path, folder)
    try:
        prefixes = parse_data_path(given.data_path(Path(folder)))[0]
        return [(file, str(Path(prefix).parent)) for file, prefix in zip(given.files, prefixes, strict=True)]
    except ValueError as why:
        raise DataError(f"data_path={data_path} {why}") from None


def set_up_logging(level: str) -> None:
    """Log at this level; to stderr, unless the program has set up its logging."""
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


def process_files(given: FineTuning, folders: Sequence[Path], max_length: int, *, has_pairs: bool) -> Iterator[Samples]:
    """Tokenize each file of a run's data into its folder, and yield its dataset, or that of a folder without a file.

    Chats of more than `max_length` tokens become what `given` says; no chat is too short. Raises DataError.
    """
    for folder, file in zip_longest(folders, given.files):
        if file is None:
            yield open_samples(folder, has_pairs=has_pairs)
        elif has_pairs:
            yield process_pairs(file, str(folder), given.model, given.chat_template, given.ignore_columns)
        else:
            yield process_data(
                data_path=file,
                data_output_path=str(folder),
                max_seq_len=max_length,
                model_path=given.model,
                chat_tmpl_path=given.chat_template,
                train_on=given.train_on,
                too_long=given.too_long,
                min_length=1,
                ignore_columns=given.ignore_columns,
            )


def process_data(
    data_path: str,
    data_output_path: str,
    max_seq_len: int,
    model_path: str,
    num_cpu_procs: int = 16,
    chat_tmpl_path: str | None = None,
    train_on: TrainOn = "assistant",
    too_long: TooLong = "drop",
    min_length: int = SHORTEST_SAMPLE,
    ignore_columns: tuple[str, ...] = (),
) -> Samples:
    """Tokenize the chats of a file and return the dataset. The defaults leave out what InstructLab does."""
    folder, model = Path(data_output_path), Path(model_path)
    job = ChatJob(
        inputs=(data_path,),
        output_prefix=str(folder / NAME),
        tokenizer=model_path,
        chat_template=chat_tmpl_path,
        max_length=max_seq_len,
        too_long=too_long,
        # with a shorter limit than SHORTEST_SAMPLE none would be left
        min_length=min(min_length, max_seq_len),
        bad_rows="error",
        train_on=train_on,
        ignore_columns=ignore_columns,
        append_eos=True,
        # the tokenizer's own template has its tokens there already
        add_special_tokens=chat_tmpl_path is not None,
        tokenizer_output=str(folder / "tokenizer"),
        # the cores of this process: a scheduler or a container may leave it fewer than the machine has
        workers=min(num_cpu_procs, len(os.sched_getaffinity(0))),
        # `_once` has found no dataset of the same inputs in the folder
        overwrite=True,
    )
    made_of = _made_of(data_path, model, chats=True, max_seq_len=max_seq_len, min_length=job.min_length)
    if chat_tmpl_path is not None:
        made_of["chat_template"] = _content(Path(chat_tmpl_path)) or chat_tmpl_path
    # a default adds nothing, so that data of earlier releases is used again
    if train_on != "assistant":
        made_of["train_on"] = train_on
    if too_long != "drop":
        made_of["too_long"] = too_long
    if ignore_columns:
        made_of["ignore_columns"] = sorted(ignore_columns)

    def make() -> dict[str, Any]:
        totals = preprocess_chats(job)
        logger.info("processed %s: %s", data_path, _summary(totals))
        return {"vocab_size": totals.vocab_size, "tokenizer": "tokenizer"}

    return _once(folder, made_of, make)


def _summary(totals: ChatTotals) -> str:
    counts = totals.counts
    text = f"{totals.num_samples:,} samples of {counts.num_rows:,} rows, {totals.num_tokens:,} tokens"
    text += f", {counts.num_loss_tokens:,} of them trained; format: {', '.join(counts.forms)}"
    left_out = [f"{count:,} {reason}" for reason, count in {**counts.dropped, **counts.bad}.items()]
    if totals.added_tokens:
        text += f"; added to the tokenizer: {' '.join(totals.added_tokens)}"
    if counts.left_out:
        unwritten = [f"{count:,} {kind}" for kind, count in counts.left_out.items()]
        text += f"; not written by the template: {', '.join(unwritten)}"
    if left_out:
        text += f"; left out: {', '.join(left_out)}"
    return text


def process_pairs(
    data_path: str,
    data_output_path: str,
    model_path: str,
    chat_tmpl_path: str | None = None,
    ignore_columns: tuple[str, ...] = (),
) -> Samples:
    """Tokenize a file of preferences, uncut. Raises DataError."""
    folder, model = Path(data_output_path), Path(model_path)
    job = PreferenceJob(
        inputs=(data_path,),
        output_prefix=str(folder / NAME),
        tokenizer=model_path,
        chat_template=chat_tmpl_path,
        ignore_columns=ignore_columns,
        workers=len(os.sched_getaffinity(0)),
        overwrite=True,
    )
    made_of = _made_of(data_path, model, pairs=True)
    if ignore_columns:
        made_of["ignore_columns"] = sorted(ignore_columns)
    if chat_tmpl_path is not None:
        made_of["chat_template"] = _content(Path(chat_tmpl_path)) or chat_tmpl_path

    def make() -> dict[str, Any]:
        totals = preprocess_preferences(job)
        if chat_tmpl_path is not None:  # for the exports
            source = find_template(chat_tmpl_path, model)
            write_tokenizer(str(folder / "tokenizer"), job.encoder().tokenizer, model_path, source)
        num_unpaired = totals.counts.num_unpaired
        counts = f"{totals.num_pairs - num_unpaired} pairs, {num_unpaired} rows with one answer"
        logger.info("processed %s: %s", data_path, counts)
        return {"vocab_size": totals.vocab_size, "tokenizer": None if chat_tmpl_path is None else "tokenizer"}

    return _once(folder, made_of, make, has_pairs=True)


def process_documents(
    data_path: str, data_output_path: str, model_path: str, block_size: int, document_column_name: str = "document"
) -> Samples:
    """Concatenate raw documents, each ended by the EOS token, and cut them into blocks that are trained on whole."""
    folder, model = Path(data_output_path), Path(model_path)
    made_of = _made_of(data_path, model, chats=False, block_size=block_size, column=document_column_name)

    def make() -> dict[str, Any]:
        num_documents, vocab_size = write_blocks(
            Path(data_path), model, folder / NAME, folder / (NAME + LOSS_MASK_SUFFIX), block_size, document_column_name
        )
        logger.info("processed %s: %d documents", data_path, num_documents)
        return {"vocab_size": vocab_size, "tokenizer": None}

    return _once(folder, made_of, make)


def write_blocks(
    data_path: Path, model: Path, tokens_prefix: Path, mask_prefix: Path, block_size: int, column: str
) -> tuple[int, int]:
    """Write blocks of tokens, the last one shorter, and masks of ones. Returns the numbers of documents and token ids.

    A document begins with what the tokenizer puts first, and ends with its EOS token. Raises DataError.
    """
    import tokenizers

    path = model / TOKENIZER_NAME
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} is not a tokenizer ({error}); model_path must hold the model's own") from None
    eos = tokenizer.token_to_id(named_tokens(read_config(model)).get("eos_token", ""))
    if eos is None:
        raise DataError(f"the tokenizer in {model} has no EOS token; name it in tokenizer_config.json")
    # the largest id counts, not the number of tokens: ids may have gaps
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    dtype = best_dtype(vocab_size)
    # `left`: the ids behind the last whole block, fewer than block_size between two batches
    num_documents, left = 0, np.empty(0, dtype)
    with (
        IndexedDatasetBuilder(tokens_prefix, dtype) as tokens,
        IndexedDatasetBuilder(mask_prefix, np.uint8) as mask,
    ):

        def add(block: NDArray[np.integer]) -> None:
            tokens.add_document(block)
            mask.add_document(np.ones(len(block), np.uint8))

        texts = _texts(data_path, column)
        while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
            documents = []
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=True):
                documents += encoding.ids
                if encoding.ids[-1:] != [eos]:  # some tokenizers write it themselves
                    documents.append(eos)
            left = np.concatenate([left, np.array(documents, dtype)])
            # blocks cross documents, and batches
            whole = len(left) // block_size * block_size
            for start in range(0, whole, block_size):
                add(left[start : start + block_size])
            left = left[whole:]
            num_documents += len(batch)
        if len(left) > 1:  # a single token predicts nothing
            add(left)
        if not tokens.num_tokens:
            raise DataError(f"{data_path} holds no documents under {column!r}")
        mask.finalize()
        tokens.finalize()
    return num_documents, vocab_size


def _texts(data_path: Path, column: str) -> Iterator[str]:
    """Yield the texts that are not empty. Raises DataError that names the line."""
    with data_path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = orjson.loads(line)[column]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(f"{data_path}, line {number} is not an object with a text under {column!r}; correct it")
            if text:
                yield text


def make_mock_data(folder: Path, num_samples: int, longest: int, vocab_size: int, seed: int) -> Samples:
    """Write random tokens, half of each sample trained, to try a setup without data."""
    lengths = np.random.default_rng(seed).integers(max(2, longest // 2), longest, num_samples, endpoint=True)
    made_of = {"mock": [num_samples, longest, vocab_size, seed]}

    def make() -> dict[str, Any]:
        generator = np.random.default_rng([seed, 1])
        with (
            IndexedDatasetBuilder(folder / NAME, best_dtype(vocab_size)) as tokens,
            IndexedDatasetBuilder(folder / (NAME + LOSS_MASK_SUFFIX), np.uint8) as mask,
        ):
            for length in lengths:
                # numpy draws in the machine's own order of bytes alone, and the file's is little-endian
                tokens.add_document(generator.integers(0, vocab_size, length, dtype=tokens.dtype.newbyteorder("=")))
                mask.add_document((np.arange(length) >= length // 2).astype(np.uint8))
            mask.finalize()
            tokens.finalize()
        return {"vocab_size": vocab_size, "tokenizer": None}

    return _once(folder, made_of, make)


def open_samples(folder: Path, *, has_pairs: bool = False) -> Samples:
    """Return the dataset of a folder, of pairs or of samples with a loss mask. Raises DataError if it is not one."""
    prefix = folder / NAME
    masks = [] if has_pairs else [f"{prefix}{LOSS_MASK_SUFFIX}.idx"]
    missing = [path for path in (f"{prefix}.idx", *masks) if not Path(path).is_file()]
    if missing:
        raise DataError(
            f"{folder} holds no processed data, it lacks {' and '.join(missing)}; leave process_data=True, or call "
            "data_process.main with data_output_path set to this folder"
        )
    record: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # made by tools/preprocess_chat.py
        record = parse_json((folder / f"{NAME}.json").read_text(encoding="utf-8"))
    dataset = IndexedDataset(prefix)
    if not len(dataset):
        raise DataError(f"{prefix} holds no samples; check what was left out of it, and why")
    name = record.get("tokenizer")
    tokenizer = str(folder / name) if name and (folder / name).is_dir() else None
    lengths = dataset.lengths.astype(np.int64)
    if has_pairs:
        if len(lengths) != SEQUENCES * dataset.num_documents:
            raise DataError(f"{prefix} does not hold pairs of answers; give HL_DATA, the file of the pairs")
        # a sample is the prompt with either answer
        # (pairs, 3) lengths: the prompt, then its two answers
        prompts, *answers = lengths.reshape(-1, SEQUENCES).T
        lengths = prompts + np.maximum(*answers)
    manifest = read_manifest(prefix)
    return Samples(
        prefix=str(prefix),
        num_samples=len(lengths),
        longest=int(lengths.max()),
        vocab_size=record.get("vocab_size"),
        tokenizer=tokenizer,
        outcomes={} if manifest is None else manifest.header["outcomes"],
        unit="pairs" if has_pairs else "chats",
    )


def _made_of(data_path: str, model: Path, **options: Any) -> dict[str, Any]:
    """Return digests of all that determines the samples. Raises DataError if the data is not there."""
    if not Path(data_path).is_file():
        raise DataError(f"data_path={data_path} is not a file; give the JSONL file of the messages")
    # by content: a copy of the same files, with other times, makes the same samples
    digests = {name: _content(model / name) for name in TOKENIZER_FILES}
    tokenizer = {name: digest for name, digest in digests.items() if digest is not None}
    return {"data": file_sha256(data_path), "tokenizer": tokenizer, **options}


def _content(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _once(
    folder: Path, made_of: dict[str, Any], make: Callable[[], dict[str, Any]], *, has_pairs: bool = False
) -> Samples:
    """Return the dataset that `make` writes to a folder, unless one from equal inputs is there, from any node."""
    record = folder / f"{NAME}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder):
            with contextlib.suppress(OSError, ValueError):
                if parse_json(record.read_text(encoding="utf-8"))["made_of"] == made_of:
                    samples = open_samples(folder, has_pairs=has_pairs)
                    logger.info("data_output_dir %s holds these samples already: %s", folder, samples.describe())
                    return samples
            # else a `make` that fails would leave its files under the record of others
            record.unlink(missing_ok=True)
            made = make()
            # last: without a record a run that was killed before counts as none
            with replacing(record) as file:
                file.write(json.dumps({"made_of": made_of, **made}, indent=1).encode() + b"\n")
            return open_samples(folder, has_pairs=has_pairs)
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(f"{what}; the data's folder must be writable") from None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other nodes. On a file system without locks each node writes whole files."""
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s cannot be locked (%s); nodes that share it may do the same work twice", folder, error)
        yield
