"""Models on this machine: found in huggingface_hub's cache, or downloaded into it, once for all processes of a host.

What a server says is not trusted: names, commits and checksums are compared before anything is written by them, and
what was downloaded is compared with the checksums of the listing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.hub.names import (
    COMMIT,
    SCHEME,
    HubError,
    HubName,
    constants,
    errors,
    name_of,
    package,
    parse_name,
    snapshot_of,
)
from megatron.runtime.files import disk_shortage, lock_file, parse_json, replacing

Needs = Literal["model", "tokenizer"]
_FILE = re.compile(r"hf://datasets/([^/@]+/[^/@]+)@([0-9a-f]+)/(.+)")
MARKERS: Mapping[Needs, tuple[str, ...]] = {
    "model": ("config.json", "adapter_config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
}
"""Files of which a snapshot in the cache has one, where it holds what is needed."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", *ADAPTERS)
"""Files of configuration, tokenizer and licence, and adapters, which are small: all but a model's weights. Code is
never downloaded."""
TEMPLATES = "additional_chat_templates/"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", *ADAPTERS)
OFFLINE = "HF_HUB_OFFLINE is set, so that nothing is downloaded"
TIMEOUT_S = 10.0
"""Time for an answer about a repository, as huggingface_hub has it for files (HF_HUB_DOWNLOAD_TIMEOUT)."""
LOOK_AGAIN_S = 0.2
SAID_AFTER_S = 2.0
THREADS = 8
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ListedFile:
    """A file as the hub lists it."""

    name: str
    num_bytes: int
    sha256: str | None
    """Checksum of a large file."""
    blob: str | None
    """Git's name of any other file."""

    def is_named_by(self, etag: str | None) -> bool:
        """Return whether a server's etag, which becomes a file name in the cache, is the checksum that was listed."""
        if etag is None:
            return False
        known = [value for value in (self.sha256, self.blob) if value is not None]
        return etag in known if known else etag.isalnum()

    def is_content_of(self, path: Path) -> bool:
        """Return whether a file has the content that was listed, as far as its checksum is known."""
        if self.sha256 is None and self.blob is None:
            return True
        digest = hashlib.sha256()
        if self.sha256 is None:
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        return digest.hexdigest() == (self.sha256 or self.blob)


def local_folder(text: str, option: str, needs: Needs = "model") -> Path:
    """Return the folder of a model or tokenizer that is given by its path, or by its name on the hub.

    Of a name it is that in huggingface_hub's cache, with everything but the weights, downloaded if need be. `option`
    names it in messages. Raises HubError.
    """
    name = name_of(text)
    if name is None:
        return Path(text)
    return find(name, needs) or _download(name, cache_folder(), f"{option}={text}", needs, with_weights=False)


def with_weights(folder: Path, option: str) -> Path:
    """Return a folder of the cache, its weights downloaded if need be; any other folder as it is. Raises HubError."""
    snapshot = snapshot_of(folder)
    if snapshot is not None and lacks_weights(folder):
        _download(snapshot.name, snapshot.cache, f"{option}={snapshot.name}", "model", with_weights=True)
    return folder


def whole_folder(text: str, option: str) -> Path:
    """Return the folder of a path or a name, with its weights. Raises HubError."""
    return with_weights(local_folder(text, option), option)


def find(name: HubName, needs: Needs = "model") -> Path | None:
    """Return the folder in huggingface_hub's cache of what was downloaded under a name, if it was. Uses no network."""
    with contextlib.suppress(Exception):  # an unusable name, or a cache that cannot be read: it is not found
        hub = package()
        for marker in MARKERS[needs]:
            path = hub.try_to_load_from_cache(name.repo, marker, revision=name.revision, cache_dir=cache_folder())
            # adapters without their tensors describe nothing
            if isinstance(path, str) and not (marker == "adapter_config.json" and lacks_weights(Path(path).parent)):
                return Path(path).parent
    return None


def downloaded_dataset(name: HubName) -> Path | None:
    """Return the folder in the cache of what was downloaded of a dataset, perhaps a part of it; None: nothing was."""
    place = cache_folder() / f"datasets--{name.repo.replace('/', '--')}"
    commit = name.revision or "main"
    with contextlib.suppress(OSError):
        commit = (place / "refs" / commit).read_text().strip()
    folder = place / "snapshots" / commit
    return folder if "/" not in commit and folder.is_dir() else None


def downloaded_file(url: str) -> Path | None:
    """Return the file in the cache of hf://datasets/ORGANISATION/NAME@COMMIT/PATH; None: it was not downloaded."""
    match = _FILE.fullmatch(url)
    if match is None or not {"", ".", ".."}.isdisjoint(match[3].split("/")):
        return None
    path = cache_folder() / f"datasets--{match[1].replace('/', '--')}" / "snapshots" / match[2] / match[3]
    return path if path.is_file() else None


def hidden_name(text: str, option: str) -> list[str]:
    """Return a note where a folder here has the name of a model in the cache, which it hides."""
    name = parse_name(text)
    if name is None or not os.path.lexists(text):
        return []
    # by the package's rules, without importing it for each path of this form
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    if not os.path.isdir(os.path.join(cache, f"models--{name.repo.replace('/', '--')}")):
        return []
    return [f"{option}={text} is the folder here, not the model of this name on the hub, {SCHEME}{name}"]


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache, by its own rules (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME)."""
    return Path(constants().HF_HUB_CACHE).expanduser()


def lacks_weights(folder: Path) -> bool:
    """Return whether files of weights are missing, by the index of several, else by their names."""
    indexes = [folder / f"{stem}.index.json" for stem in ("model.safetensors", "pytorch_model.bin")]
    named = [names for path in indexes if path.is_file() and (names := _indexed(path))]
    if named:
        return not any(all((folder / name).is_file() for name in names) for names in named)
    return not any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def _indexed(path: Path) -> set[str]:
    with contextlib.suppress(ValueError, AttributeError, OSError):  # reported where the model is opened
        return set(map(str, parse_json(path.read_bytes())["weight_map"].values()))
    return set()


def _download(name: HubName, cache: Path, given: str, needs: Needs, *, with_weights: bool) -> Path:
    """Download the files of a name that the cache lacks. `given`: for messages. Raises HubError."""
    if constants().HF_HUB_OFFLINE:
        raise HubError(_not_here(name, cache, given, OFFLINE))
    with _alone(name, cache, given):
        folder = find(name, needs)
        # another process of this host has downloaded it meanwhile
        if folder is not None and not (with_weights and lacks_weights(folder)):
            return folder
        try:
            return _downloaded(name, cache, given, needs, with_weights=with_weights)
        except HubError:
            raise
        except Exception as error:  # of huggingface_hub, its HTTP client or the disk
            raise HubError(explained(error, name, cache, given)) from error


def _downloaded(name: HubName, cache: Path, given: str, needs: Needs, *, with_weights: bool) -> Path:
    hub, endpoint = package(), constants().ENDPOINT
    commit, listed = listing(name, given)
    chosen = _chosen(listed, with_weights=with_weights)
    markers = MARKERS[needs]
    if not any(file.name in markers for file in chosen):
        raise HubError(f"{given}: the hub's repository of this name holds none of {', '.join(markers)}; give another")
    if with_weights and not any(_is_weights(file.name) for file in chosen):
        raise HubError(f"{given}: the hub's repository of this name holds no {', '.join(WEIGHTS)}; give another")
    folder = cache / f"models--{name.repo.replace('/', '--')}" / "snapshots" / commit
    missing = [file for file in chosen if not (folder / file.name).is_file()]
    num_bytes = sum(file.num_bytes for file in missing)
    if shortage := disk_shortage(cache, num_bytes):
        raise HubError(f"{given}: {shortage}; free space, or set HF_HOME to another disk")
    _check_etags(name, commit, missing, given)
    print(f"downloading {name.repo}@{commit}: {len(missing)} files, {num_bytes / 1e9:.2f} GB", file=sys.stderr)
    hub.snapshot_download(
        name.repo,
        revision=commit,
        # exact names: a [ in one would be a pattern
        allow_patterns=[glob.escape(file.name) for file in missing],
        cache_dir=cache,
        endpoint=endpoint,
    )
    _check_content(folder, missing, given)
    if name.revision != commit:
        # by which the name is found the next time, without a network
        reference = folder.parents[1] / "refs" / (name.revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        with replacing(reference) as file:
            file.write(commit.encode())
    return folder


def listing(name: HubName, given: str) -> tuple[str, list[ListedFile]]:
    """Return the commit of a name, and the files in it. Raises HubError, and what huggingface_hub raises."""
    if constants().HF_HUB_OFFLINE:
        raise HubError(_not_here(name, cache_folder(), given, OFFLINE))
    hub, endpoint = package(), constants().ENDPOINT
    info = hub.HfApi(endpoint=endpoint).repo_info(
        name.repo, repo_type=name.kind, revision=name.revision, files_metadata=True, timeout=TIMEOUT_S
    )
    # both become paths below the cache
    if not COMMIT.fullmatch(str(info.sha)):
        raise HubError(f"{given}: {endpoint} gives {str(info.sha)[:80]!r} as its commit, which a hub does not")
    files = []
    for sibling in info.siblings or ():
        path = str(sibling.rfilename)
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
            raise HubError(
                f"{given}: {endpoint} lists {path[:80]!r}, which leads out of the repository; nothing is read"
            )
        sha256 = None if sibling.lfs is None else str(sibling.lfs["sha256"])
        files.append(ListedFile(path, int(sibling.size or 0), sha256, sibling.blob_id))
    return str(info.sha), files


def _chosen(files: Iterable[ListedFile], *, with_weights: bool) -> list[ListedFile]:
    """Return the files that are read here: those of descriptions, and of the weights those in one form."""
    names = [file.name for file in files]
    unread: tuple[str, ...] = ()
    if any(fnmatch.fnmatchcase(name, "model*.safetensors") for name in names):
        unread += ("pytorch_model*.bin",)
    if "adapter_model.safetensors" in names:
        unread += ("adapter_model.bin",)
    patterns = (*DESCRIPTIONS, *WEIGHTS) if with_weights else DESCRIPTIONS
    chosen = []
    for file in files:
        if file.name.startswith(TEMPLATES):
            wanted = file.name.endswith(".jinja")
        else:
            # weights in folders are those of other programs, such as original/
            wanted = "/" not in file.name and _matches(file.name, patterns) and not _matches(file.name, unread)
        if wanted:
            chosen.append(file)
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_weights(name: str) -> bool:
    return _matches(name, WEIGHTS)


def _check_etags(name: HubName, commit: str, files: Iterable[ListedFile], given: str) -> None:
    """Raise HubError unless the server names each file by the checksum that it lists."""
    hub, endpoint = package(), constants().ENDPOINT

    def check(file: ListedFile) -> None:
        url = hub.hf_hub_url(name.repo, file.name, revision=commit, endpoint=endpoint)
        etag = hub.get_hf_file_metadata(url, timeout=TIMEOUT_S, endpoint=endpoint).etag
        # huggingface_hub stores the file by that name
        if not file.is_named_by(etag):
            raise HubError(
                f"{given}: {endpoint} names {file.name} {str(etag)[:80]!r}, and lists {file.sha256 or file.blob}; the "
                "two must be equal, nothing is read"
            )

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, files))


def _check_content(folder: Path, files: Iterable[ListedFile], given: str) -> None:
    """Raise HubError, and remove the file, where one has another content than the hub lists."""

    def damaged(file: ListedFile) -> str | None:
        path = folder / file.name
        if file.is_content_of(path):
            return None
        for place in (path.resolve(), path):
            place.unlink(missing_ok=True)
        return file.name

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [found for found in pool.map(damaged, files) if found is not None]
    if wrong:
        raise HubError(
            f"{given}: {', '.join(wrong)} has another checksum than the hub lists: it was damaged on the way, and was "
            "removed; repeat the command"
        )


@contextlib.contextmanager
def _alone(name: HubName, cache: Path, given: str) -> Iterator[None]:
    """Let one process of the host, or of those that share the cache, download a repository; others wait for it."""
    path = cache / ".locks" / f"{name.kind}s--{name.repo.replace('/', '--')}" / "megatron.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise HubError(
            f"{given}: the cache {cache} cannot be written ({error.strerror}); set HF_HOME to a folder that can"
        ) from None
    # the lock of a process that dies is released
    with file:
        began_s, is_said = time.monotonic(), False
        while not lock_file(file):
            if not is_said and time.monotonic() - began_s > SAID_AFTER_S:
                print(f"waiting for another process, which downloads {name.repo}", file=sys.stderr, flush=True)
                is_said = True
            time.sleep(LOOK_AGAIN_S)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Errors in words

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def _not_here(name: HubName, cache: Path, given: str, why: str) -> str:
    return (
        f"{given} is not here as a folder, and not whole in huggingface_hub's cache {cache}; {why}: run "
        f"`{name.download_command}` where there is a network, or give a folder"
    )


def explained(error: Exception, name: HubName, cache: Path, given: str) -> str:
    """Return the message for an error of huggingface_hub: what is wrong, and what to do."""
    kinds, endpoint = errors(), constants().ENDPOINT
    cause, status = cause_of(error)
    if isinstance(cause, kinds.GatedRepoError):
        return f"{given} is gated: accept its terms at {endpoint}/{name.repo}, and {LOG_IN}"
    if isinstance(cause, kinds.RevisionNotFoundError):
        return f"{given}: {name.repo} has no revision {name.revision}; give a branch, a tag or a commit of it"
    # the hub does not say which of the two it is
    if isinstance(cause, kinds.RepositoryNotFoundError) or status == 404:
        return (
            f"{given} is neither a folder here nor a {name.kind} that {endpoint} shows to you: correct it, or, if it "
            f"is private, {LOG_IN}"
        )
    if status is not None:
        return f"{given}: {endpoint} {_refusal(status)}"
    if isinstance(cause, OSError) and cause.errno is not None and cause.filename is not None:
        return f"{given}: {cause.filename}: {os.strerror(cause.errno)}; set HF_HOME to a folder that can be written"
    text = in_words(cause)
    if is_of_network(cause):
        return _not_here(name, cache, given, f"{endpoint} cannot be reached ({text})")
    return f"{given} could not be downloaded from {endpoint} ({text}); repeat the command, it goes on from there"


def _refusal(status: int) -> str:
    if status == 429:
        return f"has refused further requests for now (429); wait some minutes, or {LOG_IN}"
    if status in (401, 403):
        return f"refuses it to you ({status}); {LOG_IN}, with a token that may read it"
    return f"answered with status {status}; repeat the command later"


def cause_of(error: BaseException) -> tuple[BaseException, int | None]:
    """Return what an error of huggingface_hub goes back to, and the status of the server's answer, if there was one."""
    while error.__cause__ is not None and not isinstance(error, errors().HfHubHTTPError):
        error = error.__cause__
    return error, getattr(getattr(error, "response", None), "status_code", None)


def in_words(error: BaseException) -> str:
    """Return an error in one line: the package's messages may be pages."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")


def is_of_network(error: BaseException) -> bool:
    """Return whether a server could not be reached, or did not answer."""
    # of httpx, its later releases and requests, whichever huggingface_hub uses
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names & {"ConnectError", "ConnectionError", "TimeoutException", "Timeout", "NetworkError", "ProxyError"}
    )
