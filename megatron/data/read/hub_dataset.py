"""Datasets of the hub: hf://datasets/ORGANISATION/NAME[@REVISION][/PATH][?config=NAME&split=NAME].

Their files are listed at one commit, which is in the name of each, and streamed; those that have been downloaded are
read in huggingface_hub's cache. Configurations and splits are what the dataset's README.md says, else names of folders
and files. The library datasets is not used: it runs no code either, but would copy all rows into a cache of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from megatron.data.index.indexed import DataError
from megatron.data.read.input_shards import splits_in
from megatron.data.read.remote import RemoteFile, open_remote
from megatron.data.read.sources import KNOWN_NAMES, SPLIT_NAMES, InputRules
from megatron.hub.download import cache_folder, downloaded_dataset, explained, listing
from megatron.hub.names import DATASETS, HubError, HubName, is_dataset, parse_name
from megatron.runtime.files import path_matches

FORM = f"{DATASETS}ORGANISATION/NAME[@REVISION][/PATH][?config=NAME&split=NAME]"
CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps a dataset's rows as Parquet: CONFIG/SPLIT/0000.parquet."""
README = "README.md"
AS_A_PATH = "the files as a path behind the name"
LARGEST_README_BYTES = 1 << 20
NUMBERED = re.compile(r"(.*?)-(\d{5,})-of-(\d{5,})(\..*)?")
QUERY = ("config", "split")
_HEADER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_WILDCARD = re.compile(r"[*?[]")


@dataclass(frozen=True)
class DatasetUrl:
    """Part of a dataset that is to be read."""

    text: str
    name: HubName
    path: str = ""
    """File, folder or glob in it. Empty: what `config` and `split` name."""
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetUrl:
        """Raises DataError for another form."""
        address, _, query = text.removeprefix(DATASETS).partition("?")
        # a revision may have slashes itself, which a path behind it would continue: refs/pr/1
        match = re.fullmatch(r"([^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.*))?", address)
        name = None if match is None else parse_name(match[1], "dataset")
        if match is None or name is None:
            raise DataError(f"{text} is not {FORM}; correct it")
        values = _query(text, query)
        url = cls(text, replace(name, revision=match[2]), (match[3] or "").rstrip("/"), **values)
        if url.path and url.config is not None:
            raise DataError(f"{text}: a path and config=... both choose files; give one of them")
        if url.split is not None and not re.fullmatch(r"[\w.-]+", url.split):
            raise DataError(
                f"{text}: split={url.split} is not a name; parts of splits are read with --max-documents alone"
            )
        return url

    def __str__(self) -> str:
        query = "&".join(f"{key}={getattr(self, key)}" for key in QUERY if getattr(self, key) is not None)
        path = f"/{self.path}" if self.path else ""
        return f"{DATASETS}{self.name}{path}" + (f"?{query}" if query else "")


def _query(text: str, query: str) -> dict[str, str]:
    """Return the values behind the question mark of a URL. Raises DataError."""
    found = parse_qs(query, keep_blank_values=True)
    values = {key: "".join(each) for key, each in found.items()}
    is_known = values.keys() <= set(QUERY) and all(len(each) == 1 for each in found.values())
    if not is_known or not all(values.values()) or (query and not values):
        raise DataError(f"{text} is not {FORM}; correct it")
    return values


def with_split(inputs: Sequence[str], split: str | None) -> tuple[list[str], str | None]:
    """Return the inputs, and the split that files are still to be chosen by: --split of datasets goes into the URLs."""
    if split is None or not inputs or not all(map(is_dataset, inputs)):
        return list(inputs), split
    urls = [DatasetUrl.parse(text) for text in inputs]
    return [str(url if url.split is not None else replace(url, split=split)) for url in urls], None


@dataclass(frozen=True)
class _Dataset:
    """The files of a dataset at a commit."""

    url: DatasetUrl
    commit: str
    sizes: Mapping[str, int]
    """Bytes by path."""
    configs: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    """Patterns of files by configuration and split; none: README.md says nothing of them."""
    default: str | None = None

    def address(self, path: str) -> str:
        return f"{DATASETS}{self.url.name.repo}@{self.commit}/{path}"


def urls_of(text: str) -> list[str]:
    """Return the URLs of the files of a dataset, each with the commit. Raises DataError."""
    return [file.name for file, _ in find_dataset(text)]


def find_dataset(text: str) -> Iterator[tuple[RemoteFile, bool]]:
    """Yield the files of a dataset in order of name, and whether the URL names the file. Raises DataError."""
    url = DatasetUrl.parse(text)
    dataset = _local(url)
    paths: list[str] = []
    if dataset is not None:
        try:
            paths = _chosen(dataset)
            _check_numbers(dataset, paths)
        except DataError:  # only a part of it was downloaded
            dataset = None
    if dataset is None:
        dataset = _remote(url)
        paths = _chosen(dataset)
        _check_numbers(dataset, paths)
    for path in paths:
        yield RemoteFile(dataset.address(path), dataset.sizes[path], path, dataset.commit, "file"), path == url.path


def _local(url: DatasetUrl) -> _Dataset | None:
    """Return what huggingface_hub's cache has of a dataset; None: nothing."""
    folder = downloaded_dataset(url.name)
    if folder is None:
        return None
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return _described(_Dataset(url, folder.name, sizes), folder / README)


def _remote(url: DatasetUrl) -> _Dataset:
    """Return the dataset as the hub lists it. Raises DataError."""
    try:
        commit, files = listing(url.name, url.text)
    except HubError as error:
        raise DataError(str(error)) from None
    except Exception as error:  # of huggingface_hub or its HTTP client
        if url.name.revision == CONVERTED:
            raise DataError(f"{url.text}: it holds no {KNOWN_NAMES}, and the hub has not made Parquet of it") from error
        raise DataError(explained(error, url.name, cache_folder(), url.text)) from error
    dataset = _described(_Dataset(url, commit, {file.name: file.num_bytes for file in files}), None)
    is_script = not dataset.configs and not any(InputRules().form(path) for path in dataset.sizes if path != README)
    if is_script and url.name.revision is None and not url.path:
        # a dataset made by code, or of another form
        return _remote(replace(url, name=replace(url.name, revision=CONVERTED)))
    return dataset


def _described(dataset: _Dataset, readme: Path | None) -> _Dataset:
    """Return the dataset with the configurations of its README.md, from a file or, without one, from the hub."""
    if dataset.url.name.revision == CONVERTED:
        return replace(dataset, configs=_converted(dataset.sizes))
    if README not in dataset.sizes or dataset.url.path:
        return dataset
    if dataset.sizes[README] > LARGEST_README_BYTES:
        raise DataError(
            f"{dataset.url.text}: its {README} has more than {LARGEST_README_BYTES} bytes; give {AS_A_PATH}"
        )
    if readme is not None:
        text = readme.read_bytes()
    else:
        with open_remote(dataset.address(README), in_order=False) as file:
            text = file.read()
    try:
        configs, default = _configs_of(text.decode(errors="replace"))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{dataset.url.text}: the configurations in its {README} cannot be read ({error}); give {AS_A_PATH}"
        ) from None
    return replace(dataset, configs=configs, default=default)


def _configs_of(readme: str) -> tuple[dict[str, dict[str, list[str]]], str | None]:
    """Return the patterns of files by configuration and split, and the default. Raises ValueError and the like."""
    import yaml

    header = _HEADER.match(readme)
    if header is None:
        return {}, None
    try:
        content = yaml.safe_load(header[1])
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    configs, default = {}, None
    for entry in (content or {}).get("configs") or ():
        name = str(entry.get("config_name", "default"))
        configs[name] = _patterns(entry.get("data_files"), str(entry.get("data_dir") or ""))
        if entry.get("default") is True or name == "default":
            default = name
    return configs, default


def _patterns(data_files: Any, folder: str) -> dict[str, list[str]]:
    """Return the patterns by split of `data_files`, as datasets reads them: a text or list is all of train."""
    below = folder.strip("/") + "/" if folder.strip("/.") else ""
    if data_files is None:
        return {"": [f"{below}**"]}
    if isinstance(data_files, str):
        data_files = [data_files]
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in data_files:
        if isinstance(entry, str):
            entry = {"split": "train", "path": entry}
        paths = entry["path"]
        paths = [paths] if isinstance(paths, str) else list(paths)
        patterns.setdefault(str(entry["split"]), []).extend(below + str(path).removeprefix("./") for path in paths)
    return patterns


def _converted(paths: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    configs: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        parts = path.split("/")
        if len(parts) == 3 and parts[2].endswith(".parquet"):
            configs.setdefault(parts[0], {})[parts[1]] = [f"{parts[0]}/{parts[1]}/*.parquet"]
    return configs


def _chosen(dataset: _Dataset) -> list[str]:
    """Return the files that the URL names, in order. Raises DataError."""
    url = dataset.url
    if url.path:
        paths = _below(dataset, [url.path if _WILDCARD.search(url.path) else f"{url.path}/**"])
        if url.path in dataset.sizes:
            paths = [url.path]
        if not paths:
            raise DataError(f"{url.text}: the dataset holds no {url.path} at {dataset.commit}; correct it")
        return _of_split(url, paths)
    if not dataset.configs:
        folder = url.config
        paths = _below(dataset, [f"{folder}/**"] if folder else ["**"])
        if not paths:
            raise DataError(f"{url.text}: the dataset has no configuration or folder {folder}; leave config out")
        return _of_split(url, paths)
    return _of_config(dataset)


def _of_config(dataset: _Dataset) -> list[str]:
    """Return the files of the configuration and split that the URL names. Raises DataError."""
    url, names = dataset.url, list(dataset.configs)
    config = url.config or dataset.default
    if config is None and len(names) == 1:
        config = names[0]
    if config is None or config not in dataset.configs:
        given = "it has several configurations" if config is None else f"it has no configuration {config}"
        raise DataError(f"{url.text}: {given}; give one of {', '.join(names)} as ?config=NAME")
    splits = dataset.configs[config]
    if "" in splits:  # a folder, whose files are of splits by their names
        return _of_split(url, _below(dataset, splits[""]))
    wanted = _named_split(url, config, list(splits))
    paths = _below(dataset, splits[wanted])
    if not paths:
        raise DataError(f"{url.text}: no file of the dataset is {' or '.join(splits[wanted])}; give {AS_A_PATH}")
    return paths


def _named_split(url: DatasetUrl, config: str, splits: Sequence[str]) -> str:
    """Return the split of a configuration that the URL names. Raises DataError."""
    if url.split is None:
        if len(splits) > 1:
            remedy = f"give one of {', '.join(splits)} as split=NAME"
            raise DataError(f"{url.text}: its configuration {config} has several splits; {remedy}")
        return splits[0]
    # as --split takes dev for validation
    standard = {SPLIT_NAMES.get(split, split): split for split in splits} | {split: split for split in splits}
    wanted = standard.get(url.split) or standard.get(SPLIT_NAMES.get(url.split, url.split))
    if wanted is None:
        remedy = f"give one of {', '.join(splits)} as split=NAME"
        raise DataError(f"{url.text}: its configuration {config} has no split {url.split}; {remedy}")
    if wanted.startswith("partial-"):
        raise DataError(f"{url.text}: the hub holds only the first 5 GB of {wanted} as Parquet; give {AS_A_PATH}")
    return wanted


def _below(dataset: _Dataset, patterns: Sequence[str]) -> list[str]:
    parts = [pattern.split("/") for pattern in patterns]
    return sorted(path for path in dataset.sizes if any(path_matches(path.split("/"), each) for each in parts))


def _of_split(url: DatasetUrl, paths: Sequence[str]) -> list[str]:
    """Return the files of the split by their names. Raises DataError, also where none of several is named."""
    readable = [path for path in paths if InputRules().form(path) is not None]
    splits = {path: splits_in(path, url.split) for path in readable}
    known = set().union(*splits.values()) if splits else set()
    if url.split is None:
        if url.path or len(known) < 2 or "train" not in known:
            return list(paths)
        raise DataError(f"{url.text}: the dataset has the splits {', '.join(sorted(known))}; give one as ?split=NAME")
    wanted = SPLIT_NAMES.get(url.split, url.split)
    chosen = [path for path in readable if wanted in splits[path]]
    # a single file is the data, whatever its name says
    if not chosen and not known and len(readable) == 1 and wanted == "train":
        chosen = readable
    if not chosen:
        names = ", ".join(sorted(known)) or "no name of a split"
        raise DataError(f"{url.text}: no file has split {url.split} in its name; they have {names}")
    return chosen


def _check_numbers(dataset: _Dataset, paths: Sequence[str]) -> None:
    """Raise DataError where one of files numbered -00000-of-00005 is missing."""
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for path in paths:
        match = NUMBERED.fullmatch(path)
        if match is not None and path != dataset.url.path and not _WILDCARD.search(dataset.url.path):
            numbers.setdefault((match[1], match[3], match[4] or ""), set()).add(int(match[2]))
    for (stem, count, ending), found in numbers.items():
        # the first that is missing: the count is foreign, and may be any number
        missing = next(number for number in range(len(found) + 1) if number not in found)
        if missing < int(count):
            name = f"{stem}-{missing:0{len(count)}d}-of-{count}{ending}"
            raise DataError(f"{dataset.url.text}: the dataset lacks {name}; give another revision, or {AS_A_PATH}")
