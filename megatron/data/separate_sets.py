"""Held-out data of several datasets that are evaluated one by one (`multiple_validation_sets`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from megatron.data.blend import digest, normalize


class SeparateSets:
    """Datasets of one split, by name, with the weight of each in their mean; None: by what their losses count.

    A task's `open_data` may return one in place of a validation or test dataset.
    """

    def __init__(self, prefixes: Sequence[str], datasets: Sequence[Any], weights: Sequence[float] | None):
        self.prefixes, self.datasets = list(prefixes), list(datasets)
        self.names = names_of(prefixes)
        self.weights = None if weights is None else normalize(weights).tolist()
        self.fingerprint = digest("separate", [dataset.fingerprint for dataset in datasets], self.weights)

    def __len__(self) -> int:
        """Return the number of samples of the shortest dataset."""
        return min(map(len, self.datasets))

    def map(self, function: Callable[[Any], Any]) -> SeparateSets:
        """Return the results of a function of each dataset."""
        return SeparateSets(self.prefixes, [function(dataset) for dataset in self.datasets], self.weights)


def sets_of(dataset: Any) -> list[Any]:
    """Return the datasets that are evaluated one by one, or the dataset itself; none for None."""
    if dataset is None:
        return []
    return dataset.datasets if isinstance(dataset, SeparateSets) else [dataset]


def names_of(prefixes: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths, of whole parts, that differ from each other."""
    parts = [PurePath(prefix).parts for prefix in prefixes]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(prefixes, 1)]  # one of them twice
