"""megatron-core's side of the comparisons: answers requests, one JSON line each, from standard input to output.

Runs in an interpreter with megatron-core in it and without this project (see benchmarks/alternating.py), so it imports
nothing of ours. The functions of REQUESTS take what their request names; times are taken here, around the work alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of optional packages that the datasets do not use
    import megatron.core as megatron_core
    from megatron.core.datasets import (
        blended_dataset,
        blended_megatron_dataset_builder,
        gpt_dataset,
        helpers,
        indexed_dataset,
    )

BlendedDataset = blended_dataset.BlendedDataset
BlendedMegatronDatasetBuilder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
GPTDataset = gpt_dataset.GPTDataset
IndexedDataset, IndexedDatasetBuilder = indexed_dataset.IndexedDataset, indexed_dataset.IndexedDatasetBuilder

warnings.filterwarnings("ignore", message=".*writable.*|.*pad token id.*")


class Vocabulary:
    """Stand-in tokenizer with all that GPTDataset reads: a size, and the ids of end of document and padding."""

    vocab_size = 50257
    eod = 50256
    pad = -1  # in no dataset: GPTDataset masks padding wherever it finds this id
    unique_identifiers = {"class": "Vocabulary"}  # noqa: RUF012  (megatron-core only reads it)


def versions() -> str:
    return f"megatron-core {megatron_core.__version__}, numpy {np.__version__}, torch {torch.__version__}"


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_files(prefix: str, out: str) -> None:
    """Everything that IndexedDataset gives of a dataset, into the .npz file `out`."""
    dataset = IndexedDataset(prefix)
    sequences = [dataset[i] for i in range(len(dataset))]
    np.savez(
        out,
        tokens=np.concatenate(sequences),
        lengths=np.array([len(sequence) for sequence in sequences], dtype=np.int32),
        document_index=dataset.document_indices,
    )


def write_files(documents: str, prefix: str) -> None:
    """The documents of an .npz file (tokens, lengths, sequences of each document) through IndexedDatasetBuilder."""
    with np.load(documents) as arrays:
        tokens, lengths, sequences = arrays["tokens"], arrays["lengths"].tolist(), arrays["sequences"].tolist()
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=tokens.dtype.type)
    sequence = token = 0
    for count in sequences:
        own = lengths[sequence : sequence + count]
        builder.add_document(torch.from_numpy(tokens[token : token + sum(own)].copy()), own)
        sequence, token = sequence + count, token + sum(own)
    builder.finalize(prefix + ".idx")


def merge_files(prefixes: list[str], prefix: str) -> None:
    """The datasets one after another, as Megatron-LM's merging tool joins them."""
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=IndexedDataset(prefixes[0]).index.dtype)
    for part in prefixes:
        builder.add_index(part)
    builder.finalize(prefix + ".idx")


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def dataset_config(seed: int, seq_length: int, split: str | None, **blends: Any) -> Any:
    return gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        split=split,
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **blends,
    )


def build_datasets(
    blend: Any, blend_per_split: Any, split: str | None, sizes: list[int | None], seq_length: int, seed: int, out: str
) -> list[dict[str, Any] | None]:
    """The splits as a training run builds them: what each is, with all of its arrays and some samples in `out`."""
    config = dataset_config(seed, seq_length, split, blend=blend, blend_per_split=blend_per_split)
    config.create_attention_mask = False  # [seq_length, seq_length] for each sample
    splits = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    arrays: dict[str, Any] = {}
    described: list[dict[str, Any] | None] = []
    for name, dataset in zip(("train", "valid", "test"), splits, strict=True):
        if dataset is None:
            described.append(None)
            continue
        blended = isinstance(dataset, BlendedDataset)
        if blended:
            arrays[f"{name}.dataset_index"] = dataset.dataset_index
            arrays[f"{name}.dataset_sample_index"] = dataset.dataset_sample_index
        members = dataset.datasets if blended else [dataset]
        for number, member in enumerate(members):
            for array in ("document_index", "sample_index", "shuffle_index"):
                arrays[f"{name}.{number}.{array}"] = getattr(member, array)
        some = [dataset[i] for i in np.linspace(0, len(dataset) - 1, min(3, len(dataset))).astype(int).tolist()]
        arrays[f"{name}.samples"] = np.array([[*one["tokens"].tolist(), int(one["labels"][-1])] for one in some])
        described.append({"samples": len(dataset), "blended": blended, "members": len(members)})
    np.savez(out, **arrays)
    return described


# ---------------------------------------------------------------------------------------------------------------------
# Speed

opened: dict[str, Any] = {}
"""Datasets opened by a request, for the timed ones that follow."""


def open_index(prefix: str) -> None:
    opened["index"] = IndexedDataset(prefix)  # kept: it closes its maps under the arrays it gave out


def build_index(num_samples: int, seq_length: int, seed: int) -> dict[str, Any]:
    """The three arrays, with the very calls of GPTDataset and without its cache files."""
    lengths = opened["index"].sequence_lengths
    documents = np.arange(len(lengths), dtype=np.int32)
    began_s = time.perf_counter()
    tokens_per_epoch = int(np.sum(lengths[documents]))
    num_epochs = 1
    while num_epochs * tokens_per_epoch < num_samples * seq_length + 1:
        num_epochs += 1
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    separate = num_epochs > 1 and num_samples - before_last < int(0.8 * ((tokens_per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    document_index = gpt_dataset._build_document_index(documents, num_epochs, random, separate)
    sample_index = helpers.build_sample_idx(
        lengths.copy(), document_index, seq_length, num_epochs, tokens_per_epoch, True, True
    )
    total = len(sample_index) - 1
    shuffle_index = gpt_dataset._build_shuffle_index(before_last if separate else total, total, random)
    elapsed_s = time.perf_counter() - began_s
    arrays = {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}
    return {"seconds": elapsed_s, "digests": {name: digest(array) for name, array in arrays.items()}}


def digest(array: Any) -> str:
    """Shape, type and content. The other side writes the same words."""
    return f"{array.shape} {array.dtype} {hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}"


def open_samples(prefix: str, num_samples: int, seq_length: int, seed: int) -> int:
    """A GPTDataset as a training run has it; its length."""
    config = dataset_config(seed, seq_length, "1,0,0", blend=([prefix], None))
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 1, 1], lambda: True, config)
    opened["samples"] = builder.build()[0]
    return len(opened["samples"])


def read_samples(indices: str, tokens_only: bool) -> dict[str, Any]:
    """Samples one at a time, whole or, with tokens_only, without the tensors, masks and positions made of them."""
    order = np.load(indices).tolist()
    dataset = opened["samples"]
    read = dataset._query_document_sample_shuffle_indices if tokens_only else dataset.__getitem__
    began_s = time.perf_counter()
    for index in order:
        read(index)
    elapsed_s = time.perf_counter() - began_s
    checked = [dataset[index] for index in order[:100]]
    sums = [int(one["tokens"].sum() + one["labels"][-1]) for one in checked]
    return {"seconds": elapsed_s, "sums": sums}


REQUESTS = {
    function.__name__: function
    for function in (
        versions,
        read_files,
        write_files,
        merge_files,
        build_datasets,
        open_index,
        build_index,
        open_samples,
        read_samples,
    )
}


def main() -> None:
    logging.disable(logging.WARNING)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": REQUESTS[request["request"]](**request["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
