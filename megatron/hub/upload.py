"""Upload of a finished export to the hub, in one commit, with the user's token by huggingface_hub's own rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.hub.download import WEIGHTS, cause_of, in_words, is_of_network
from megatron.hub.names import HubError, HubName, constants, errors, package, parse_name

OPTION = "--push-to-hub"
INDEXES = ("*.index.json",)


def check_target(text: str) -> HubName:
    """Return the repository to upload to, once the user is known to the hub. Raises HubError.

    Before the work: a conversion takes hours, and a missing token need not be found at its end.
    """
    name = parse_name(text)
    if name is None or name.revision is not None:
        raise HubError(f"{OPTION} {text} does not name a repository; give ORGANISATION/NAME")
    try:
        _api().whoami()
    except Exception as error:  # of huggingface_hub or its HTTP client
        raise HubError(f"{OPTION} {name}: {_why(error)}; nothing was started") from error
    return name


def push(folder: Path, name: HubName, message: str) -> str:
    """Upload a folder in one commit; return its address. Raises HubError, with the folder as it was.

    A new repository is private: what was published by mistake cannot be taken back. Weights that were there before and
    are not in the folder are removed in the same commit, as a model of fewer files would be joined with them.
    """
    api = _api()
    try:
        api.create_repo(name.repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name.repo, folder_path=folder, commit_message=message, delete_patterns=[*WEIGHTS, *INDEXES]
        )
    except Exception as error:  # of huggingface_hub or its HTTP client
        raise HubError(
            f"{OPTION} {name}: {_why(error)}. {folder} is whole; upload it with `hf upload {name.repo} {folder}`"
        ) from error
    return str(commit.commit_url)


def _api() -> Any:
    if constants().HF_HUB_OFFLINE:
        raise HubError(f"{OPTION} needs the network, and HF_HUB_OFFLINE is set; unset it, or leave {OPTION} out")
    return package().HfApi(endpoint=constants().ENDPOINT)


def _why(error: Exception) -> str:
    """Return what prevented an upload, and what to do."""
    endpoint = constants().ENDPOINT
    cause, status = cause_of(error)
    if isinstance(cause, errors().LocalTokenNotFoundError):
        return "there is no token; log in with `hf auth login`, or set HF_TOKEN to one that may write"
    if status in (401, 403):
        return f"{endpoint} refuses it ({status}); log in with `hf auth login`, with a token that may write there"
    if status is not None:
        return f"{endpoint} answered with status {status}; repeat it later"
    words = in_words(cause)
    return f"{endpoint} cannot be reached ({words})" if is_of_network(cause) else words
