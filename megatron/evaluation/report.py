"""Loss, perplexity and bits per byte of an indexed dataset."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.index.indexed import LOSS_MASK_SUFFIX, DataError, IndexedDataset, check_vocabulary
from megatron.data.prepare.manifest import read_manifest
from megatron.data.tokenizers.base import Tokenizer
from megatron.evaluation.commands import Commands
from megatron.evaluation.options import EvaluateCommand
from megatron.evaluation.scoring import Continuation, RowGraphs, score
from megatron.generation.model import InferenceModel
from megatron.resilience.errors import raise_on_all_ranks
from megatron.runtime.files import locked_output, replacing

WINDOWS_AT_ONCE = 64
"""Sequences between two sums over all ranks, for each copy of the model."""


@dataclass(frozen=True)
class DatasetScore:
    """Likelihood of a dataset."""

    num_tokens: int
    """Tokens that were predicted: all but the first."""
    num_bytes: int | None
    """Bytes of the documents' text in UTF-8; None without a tokenizer."""
    nats: float
    """Negative log-likelihood of the tokens."""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        # exp overflows a double at 709.8
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        # independent of the tokenizer, so models of different vocabularies can be compared
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def score_dataset(
    model: InferenceModel,
    prefix: str,
    length: int | None = None,
    say: Callable[[str], object] = lambda line: None,
    graphs: RowGraphs | None = None,
) -> DatasetScore:
    """Return the score of all documents, end to end, in sequences of `length` tokens. Collective.

    Each sequence begins with the token before it, as the samples of pretraining do; every token but the first is
    predicted once. `length` None: the sequence length of the model's training. `say` receives lines for the user.
    `graphs`: replay passes by them.
    Raises DataError.
    """
    ctx = model.ctx
    length = length or model.config.training.seq_length
    dataset = raise_on_all_ranks(ctx, lambda: _opened(model, prefix, say))
    num_tokens, nats, windows = len(dataset.tokens) - 1, 0.0, _windows(dataset.tokens, length)

    def read() -> list[Continuation]:
        # a memory map of a file that was truncated ends the process by SIGBUS, without an exception
        dataset.files.check(always=True)
        return list(itertools.islice(windows, WINDOWS_AT_ONCE * ctx.num_batch_ranks))

    while block := raise_on_all_ranks(ctx, read):
        # fsum rounds once for all windows of a block
        nats -= math.fsum(each.total for each in score(model, block, graphs=graphs))
    if num_tokens < 1:
        raise DataError(f"{prefix} holds fewer than two tokens, so none can be predicted; give another dataset")
    num_bytes = None if model.tokenizer is None else _num_bytes(dataset, model.tokenizer)
    return DatasetScore(num_tokens, num_bytes, nats)


def _opened(model: InferenceModel, prefix: str, say: Callable[[str], object]) -> IndexedDataset:
    """Open a dataset of the model's vocabulary; say so if its manifest names another tokenizer than the model's."""
    dataset = IndexedDataset(prefix)
    check_vocabulary(dataset, model.vocab_size)
    if Path(f"{prefix}{LOSS_MASK_SUFFIX}.bin").exists():
        say(f"warning: {prefix} is of chats; every token counts here, prompts too, not the trained answers alone")
    manifest = read_manifest(prefix)
    made_by = manifest.header["tokenizer"] if manifest is not None else None
    if made_by and model.tokenizer is not None:
        own = model.tokenizer.identity
        # a warning only: two different files may still give the same ids
        if made_by.get("sha256") != own["sha256"]:
            theirs, ours = (
                f"{each.get('type')} of {each.get('vocab_size')} tokens, sha256 {str(each.get('sha256'))[:8]}"
                for each in (made_by, own)
            )
            say(
                f"warning: {prefix} was written with another tokenizer ({theirs}) than the model's ({ours}); unless "
                "both give the same ids, its figures mean nothing"
            )
    return dataset


def _windows(tokens: NDArray[Any], length: int) -> Iterator[Continuation]:
    """Yield sequences of at most length + 1 tokens; each begins with the last token of the one before."""
    # each window shares one token with the next: the last label of one is the first input of the other
    for begin in range(0, len(tokens) - 1, length):
        first, *rest = tokens[begin : begin + length + 1].tolist()
        yield Continuation((first,), tuple(rest))


def _num_bytes(dataset: IndexedDataset, tokenizer: Tokenizer) -> int:
    """Count the bytes of all documents' texts, without what stands for no text."""
    hidden = np.array(sorted(tokenizer.special_ids), dtype=np.int64)
    # document_index holds sequence numbers, one more than there are documents; here: tokens before each document
    ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])[dataset.document_index]
    count = 0
    for begin, end in pairwise(ends.tolist()):
        document = dataset.tokens[begin:end].astype(np.int64)
        # EOD and other special tokens are no bytes of the text
        text = tokenizer.decode(document[~np.isin(document, hidden)].tolist())
        count += len(text.encode("utf-8", "replace"))
    return count


def described(prefix: str, found: DatasetScore) -> str:
    """Return the line of a dataset's score."""
    bits = found.bits_per_byte
    of_bytes = "bits per byte unknown without a tokenizer"
    if bits is not None:
        of_bytes = f"{bits:.4f} bits per byte of {found.num_bytes:,} bytes"
    return (
        f"{Path(prefix).name}: loss {found.loss:.6f}, perplexity {found.perplexity:.4f} over {found.num_tokens:,} "
        f"tokens; {of_bytes}; {found.nats:,.2f} nats"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Results of an evaluation: lines and tables on stdout, and a JSON file in lm-eval's form.


class EvaluationReport:
    """Collection of what was measured. Only rank 0 prints and writes.

    As a context it holds the output file, so that a second start does not overwrite it: collective, raises DataError.
    """

    def __init__(self, command: EvaluateCommand, model: InferenceModel) -> None:
        self._command, self._origin, self._ctx = command, model.origin, model.ctx
        self._is_first = model.ctx.rank == 0
        self._held = contextlib.ExitStack()
        self._datasets: dict[str, dict[str, Any]] = {}
        self._tasks = "{}"

    def __enter__(self) -> EvaluationReport:
        raise_on_all_ranks(self._ctx, self._lock)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _lock(self) -> None:
        output = self._command.evaluation.output
        # locked before the first measurement, which may take hours, not before the write
        if output is not None and self._is_first and not self._held.enter_context(locked_output(Path(output))):
            raise DataError(
                f"another evaluation will write to --output {output}; wait until it ends, or choose another"
            )

    def add_dataset(self, prefix: str, found: DatasetScore) -> None:
        values = dataclasses.asdict(found)
        for name in ("loss", "perplexity", "bits_per_byte"):
            values[name] = getattr(found, name)
        self._datasets[prefix] = values
        self._print(described(prefix, found))

    def add_tasks(self, commands: Commands) -> None:
        """Run the tasks. On rank 0 alone."""
        from megatron.evaluation import harness  # late: it needs lm-eval

        results = harness.run_tasks(commands, self._command.evaluation)
        self._tasks = harness.as_json(results)
        self._print(harness.table(results))

    def write(self) -> None:
        output = self._command.evaluation.output
        if output is None or not self._is_first:
            return
        content = json.loads(self._tasks)
        if self._datasets:
            content["datasets"] = self._datasets
        content["model"] = dataclasses.asdict(self._command.load)
        if self._origin is not None:  # the newest checkpoint of a run changes
            content["model"]["ckpt_step"] = self._origin.ckpt_step
        with replacing(Path(output)) as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")

    def _print(self, text: str) -> None:
        if self._is_first:
            print(text, flush=True)
