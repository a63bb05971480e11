"""Remote files, through fsspec: s3://, gs://, http://, memory:// and whatever else is installed for it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from megatron.data.index.indexed import DataError
from megatron.runtime.files import path_matches

WEB = ("http://", "https://")
GLOB_CHARACTERS = "*?["
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
        is_web = url.startswith(WEB)
        if any(character in path for character in GLOB_CHARACTERS) and not is_web:
            top = path[: min(path.index(c) for c in GLOB_CHARACTERS if c in path)].rpartition("/")[0]
            found = _listed(system, path, top)
        elif (is_web and url.endswith("/")) or (not is_web and system.isdir(path)):
            top = path.rstrip("/")
            found = _files_below(system, path)
        else:
            yield _remote_file(url, url.split("?")[0].rpartition("/")[2], system.info(path)), True
            return
        if not found:
            raise DataError(f"{url} holds no files; correct --input")
    for name in sorted(found, key=_files_before_folders):
        yield _remote_file(system.unstrip_protocol(name), _relative_name(name, top), found[name]), False


def _listed(system: Any, path: str, top: str) -> dict[str, Any]:
    """Return the files that a pattern matches, and those below the folders that it matches, as a local one does."""
    parts = path.removeprefix(top).lstrip("/").split("/")
    if "**" in parts:
        below = _files_below(system, top)
        return {name: below[name] for name in below if path_matches(_relative_name(name, top).split("/"), parts)}
    found: dict[str, Any] = {}
    for name, info in system.glob(path, detail=True).items():
        found |= _files_below(system, name) if info["type"] == "directory" else {name: info}
    return found


def _files_below(system: Any, folder: str) -> dict[str, Any]:
    """Return the files of a folder and of those below it, by name. Raises what `ls` raises."""
    found = system.find(folder, withdirs=True, detail=True)
    filled = {name.rstrip("/").rpartition("/")[0] for name in found}
    folders = {folder, *(name for name, info in found.items() if info["type"] == "directory")}
    for name in sorted(folders):
        if name.rstrip("/") not in filled:
            system.ls(name, detail=True)  # `find` is silent about a folder that cannot be listed
    # the page of a web folder links to itself, in other orders
    found = {name: info for name, info in found.items() if not (name.startswith(WEB) and "/?" in name)}
    return {name: info for name, info in found.items() if name not in folders}


def _relative_name(name: str, top: str) -> str:
    return name.removeprefix(top).lstrip("/")


def open_remote(url: str, *, in_order: bool) -> IO[bytes]:
    """Open a file for reading, `in_order` or at any place. Raises DataError."""
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
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return RemoteFile(url, info.get("size"), relative_name, version, info["type"])


@contextlib.contextmanager
def _named_errors(url: str) -> Iterator[None]:
    """Turn the errors of a file system, whose types depend on its library, into a DataError."""
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
        # over http a file is "not found" whatever the server said, or if there is none
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            missing = str(error.args[-1]) if error.args and "://" in str(error.args[-1]) else url
            raise DataError(f"{missing} does not exist; correct --input") from error
        raise DataError(f"{url} cannot be opened ({_in_words(cause)}); correct --input, or its credentials") from error


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no reason given'}"
