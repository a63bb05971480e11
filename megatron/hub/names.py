"""Names of models and datasets on the hub, `ORGANISATION/NAME[@REVISION]`, and the folders of its cache.

The hub's own package, huggingface_hub, is imported where a name is resolved, and by no run that has none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.runtime.commands import UserError

Kind = Literal["model", "dataset"]
SCHEME = "hf://"
DATASETS = f"{SCHEME}datasets/"
"""Begin of the address of a dataset: data/read/hub_dataset.py."""
COMMIT = re.compile(r"[0-9a-f]{40}")
# as the hub allows them: no part begins or ends with . or -
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:{SCHEME})?({_PART}/{_PART})(?:@([A-Za-z0-9_][A-Za-z0-9._/-]*))?")
_SNAPSHOT = re.compile(r"/(model|dataset)s--([^/]+)/snapshots/([^/]+)$")


def is_dataset(text: str) -> bool:
    """Return True for the address of a dataset on the hub."""
    return text.startswith(DATASETS)


def package() -> Any:
    """Import and return huggingface_hub, which takes a second."""
    import huggingface_hub

    return huggingface_hub


def constants() -> Any:
    """Return its module of settings, as it has read them from the environment."""
    from huggingface_hub import constants

    return constants


def errors() -> Any:
    """Return its module of exceptions."""
    from huggingface_hub import errors

    return errors


class HubError(UserError):
    """A name of the hub cannot be resolved, downloaded or uploaded: which, why, and what to do."""


@dataclass(frozen=True)
class HubName:
    """Name of a model or dataset on the hub."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit. None: main."""
    kind: Kind = "model"

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def download_command(self) -> str:
        """The command of huggingface_hub that downloads it, where there is a network."""
        words = ["hf download", self.repo]
        if self.kind == "dataset":
            words.append("--repo-type dataset")
        if self.revision is not None:
            words.append(f"--revision {self.revision}")
        return " ".join(words)


@dataclass(frozen=True)
class Snapshot:
    """A folder of huggingface_hub's cache: a repository at a commit, or a part of its files."""

    name: HubName
    """With the commit as its revision."""
    cache: Path
    """Folder of the whole cache."""


def parse_name(text: str, kind: Kind = "model") -> HubName | None:
    """Return the name that a text has the form of; None: it can only be a path."""
    match = _NAME.fullmatch(text)
    # the hub refuses both, and stores owner--name
    if match is None or "--" in match[1] or ".." in text:
        return None
    return HubName(match[1], match[2], kind)


def name_of(text: str, kind: Kind = "model") -> HubName | None:
    """Return the name that a text is; None: it is a path, or what is there by that path comes first.

    hf://ORGANISATION/NAME is the one on the hub, whatever is there.
    """
    name = parse_name(text, kind)
    if name is not None and not text.startswith(SCHEME) and os.path.lexists(text):
        return None
    return name


def snapshot_of(folder: Path | str) -> Snapshot | None:
    """Return the snapshot of huggingface_hub's cache that a folder is; None: another folder."""
    # models--OWNER--NAME/snapshots/COMMIT
    real = os.path.realpath(folder)
    match = _SNAPSHOT.search(real)
    if match is None:
        return None
    kind: Kind = "model" if match[1] == "model" else "dataset"
    return Snapshot(HubName(match[2].replace("--", "/"), match[3], kind), Path(real).parents[2])


def pinned(folder: Path | str) -> str | None:
    """Return the name with its commit, the same on every machine, of a folder in the cache; None: another folder."""
    snapshot = snapshot_of(folder)
    return None if snapshot is None else str(snapshot.name)


def repository_of(text: str) -> str | None:
    """Return ORGANISATION/NAME of a name, or of a folder in the cache; None: another folder."""
    snapshot = snapshot_of(text)
    if snapshot is not None:
        return snapshot.name.repo
    name = name_of(text)
    return None if name is None else name.repo
