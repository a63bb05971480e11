"""Remote files, through fsspec: s3://, gs://, http://, memory:// and whatever else is installed for it."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from megatron.data.index.indexed import DataError
from megatron.hub.download import downloaded_file
from megatron.runtime.files import path_matches

WEB = ("http://", "https://")
_MAGIC = re.compile(r"[*?[]")
VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
"""Names of a property that changes with the content, in the file systems of fsspec, the best first."""


class RemoteFile(NamedTuple):
    """A file found at a URL."""

    name: str
    num_bytes: int | None
    relative_name: str
    version: str
    kind: str
    """As fsspec names it: file; link or other."""


def find_remote(url: str) -> Iterator[tuple[RemoteFile, bool]]:
    """Yield the files of a URL, a remote folder or a remote glob, in order of name, and whether the URL names the file.

    Raises DataError.
    """
    with _named_errors(url):
        system, path = _file_system(url)
        magic = None
        if not url.startswith(WEB):  # the name of a web page may have any character in it
            magic = _MAGIC.search(path)
        if magic is not None:
            top = path[: magic.start()].rpartition("/")[0]
            # not by fsspec alone: its glob leaves the files below a matching folder out
            files = _matches(system, path, top)
        elif _is_folder(system, url, path):
            top = path.rstrip("/")
            files = _files_below(system, path)
        else:
            yield _remote_file(url, url.split("?")[0].rpartition("/")[2], system.info(path)), True
            return
        if not files:
            raise DataError(f"{url} holds no files; correct --input")
    for name in sorted(files, key=_files_before_folders):
        yield _remote_file(system.unstrip_protocol(name), _relative_name(name, top), files[name]), False


def _is_folder(system: Any, url: str, path: str) -> bool:
    if url.startswith(WEB):  # any page may have links
        return url.endswith("/")
    return bool(system.isdir(path))


def _matches(system: Any, path: str, top: str) -> dict[str, Any]:
    """Return the files that a pattern matches, and those below the folders that it matches, as a local one does."""
    parts = path.removeprefix(top).lstrip("/").split("/")
    # by the rule of local patterns
    if "**" in parts:
        below = _files_below(system, top)
        return {name: below[name] for name in below if path_matches(_relative_name(name, top).split("/"), parts)}
    files: dict[str, Any] = {}
    for name, info in system.glob(path, detail=True).items():
        if info["type"] == "directory":
            files |= _files_below(system, name)
        else:
            files[name] = info
    return files


def _files_below(system: Any, folder: str) -> dict[str, Any]:
    """Return the files of a folder and of those below it, by name. Raises what `ls` raises."""
    # with folders: one that cannot be listed would only be missing
    entries = system.find(folder, withdirs=True, detail=True)
    filled = {name.rstrip("/").rpartition("/")[0] for name in entries}
    folders = {folder, *(name for name, info in entries.items() if info["type"] == "directory")}
    for name in sorted(folders):
        if name.rstrip("/") not in filled:
            system.ls(name, detail=True)  # `find` is silent about a folder that cannot be listed
    return {name: info for name, info in entries.items() if name not in folders and not _is_order_of_page(name)}


def _is_order_of_page(name: str) -> bool:
    """Return true for a link by which the page of a web folder shows itself in another order."""
    return name.startswith(WEB) and "/?" in name


def _relative_name(name: str, top: str) -> str:
    return name.removeprefix(top).lstrip("/")


def open_remote(url: str, *, in_order: bool) -> IO[bytes]:
    """Open a file for reading, `in_order` or at any place. Raises DataError."""
    # one of the hub's, in its cache
    downloaded = downloaded_file(url)
    if downloaded is not None:
        return downloaded.open("rb")
    with _named_errors(url):
        system, path = _file_system(url)
        options = {}
        if in_order and url.startswith(WEB) and not system.info(path).get("partial"):
            options["block_size"] = 0  # a stream: the server may not give parts of a file
        file: IO[bytes] = system.open(path, "rb", **options)
        return file


def lost_connection(url: str, error: Exception) -> DataError:
    """Return the error for a file that can no longer be read: what is left of it is not lost, but not yet read."""
    return DataError(f"{url} cannot be read on ({_in_words(error)}); repeat the command when it can be reached")


def _file_system(url: str) -> tuple[Any, str]:
    # an extra of the package, which local files do not need
    if importlib.util.find_spec("fsspec") is None:
        raise DataError(f"{url} is read through fsspec, which is not installed: pip install 'megatron-3d[remote]'")
    import fsspec.core

    system, path = fsspec.core.url_to_fs(url)
    return system, path


def _files_before_folders(name: str) -> list[tuple[bool, str]]:
    """Return the key of the order in which a local folder is searched."""
    *folders, file = name.split("/")
    return [*((True, folder) for folder in folders), (False, file)]


def _remote_file(url: str, relative_name: str, info: dict[str, Any]) -> RemoteFile:
    # two reads of a resumed run must see the same content
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return RemoteFile(url, info.get("size"), relative_name, version, info["type"])


@contextlib.contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """Turn the errors of a file system into a DataError."""
    # what a file system raises depends on its library
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        raise DataError(
            f"{url} needs a package that is not installed ({error}); pip install 'megatron-3d[remote]' has those for "
            "http:// and s3://"
        ) from error
    except Exception as error:
        cause: BaseException | None = error
        if isinstance(error, FileNotFoundError):
            # over http a file is "not found" whatever the server said, or if there is none
            cause = error.__cause__
        if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            raise DataError(f"{_missing_url(error) or url} does not exist; correct --input") from error
        raise DataError(f"{url} cannot be opened ({_in_words(cause)}); correct --input, or its credentials") from error


def _missing_url(error: Exception) -> str | None:
    """Return the URL that an error names: of a folder, one of the files in it."""
    last = str(error.args[-1]) if error.args else ""
    return last if "://" in last else None


def _in_words(error: BaseException) -> str:
    lines = str(error).splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:200]}"
