"""Splits of a downloaded dataset, by the names of its files: data/train-00000-of-00002.parquet, test/data.arrow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.data.indexed import DataError
from megatron.data.sources import InputListing, PassedOver, SourceFile

SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "validation",
    "evaluation": "validation",
    "dev": "validation",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
"""Words in names of files and folders -> split, as Hugging Face's datasets reads them."""


def of_split(listing: InputListing, split: str | None, inputs: Sequence[str]) -> InputListing:
    """Return the files of a split; without one, all files.

    Raises DataError if there are none, and without a split if a folder of `inputs` holds several.
    """
    found = [_splits_of(source, split) for source in listing.sources]
    if split is None:
        pairs = zip(listing.sources, found, strict=True)
        known = sorted({name for source, names in pairs if source.name not in inputs for name in names})
        if "train" in known and len(known) > 1:
            raise DataError(
                f"--input holds the splits {', '.join(known)}, which would be read as one; choose one with --split, or "
                "name the files"
            )
        return listing
    wanted = SPLITS.get(split, split)
    sources = [source for source, names in zip(listing.sources, found, strict=True) if wanted in names]
    if not sources:
        names = ", ".join(sorted({name for names in found for name in names})) or "no name of a split"
        raise DataError(f"--split {split}: no file of --input has it in its name; they have {names}")
    others = [source for source in listing.sources if source not in sources]
    passed_over = [PassedOver(source.name, "another split") for source in others]
    return InputListing(sources, [*listing.passed_over, *passed_over])


def _splits_of(source: SourceFile, split: str | None) -> set[str]:
    """Return the splits that a file is of: those in its name, else those in the innermost folder with one."""
    for part in reversed(source.relative_name.split("/")):
        words = re.split(r"[^a-z0-9]+", part.lower())
        names = {SPLITS[word] for word in words if word in SPLITS}
        if split is not None and re.search(rf"(?:^|[-._ ]){re.escape(split)}(?:[-._ ]|$)", part):
            names.add(SPLITS.get(split, split))
        if names:
            return names
    return set()
