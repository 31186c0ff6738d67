"""From a model argument to a directory: one that exists, or a Hub repository fetched through `huggingface_hub`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from minimax_jax.errors import CheckpointError

# What a checkpoint needs, from the top of the repository only.
_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model"]
_NOT_FILES = ["*/*"]

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL = "or pass a directory that holds the checkpoint"


def resolve_model(name_or_path: str, revision: str | None = None) -> Path:
    """The directory of a model.

    Args:
      name_or_path: a directory, else the id of a Hub repository (owner/name). The Hub's own cache, progress bar,
        token and offline switch (HF_HUB_OFFLINE) apply.
      revision: branch, tag or commit of a repository; without meaning for a directory.

    Raises:
      CheckpointError: no such directory, or the repository cannot be fetched.
    """
    path = os.path.expanduser(name_or_path)
    if name_or_path and os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(f"model '{name_or_path}' is a file; pass the directory that holds it")
    if _looks_like_path(name_or_path):
        raise CheckpointError(f"model '{name_or_path}': no such directory")
    if not _REPO_ID.fullmatch(name_or_path):
        raise CheckpointError(
            f"model '{name_or_path}' is neither a directory nor a Hub repository id; expected a path or owner/name"
        )
    return _fetch(name_or_path, revision)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _fetch(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT_FILES))
    except Exception as error:  # besides its own, huggingface_hub lets those of its HTTP library through
        reason = _reason(error, repo_id, revision)
        raise CheckpointError(f"model '{repo_id}' is no directory here, and from the Hub: {reason}") from error


def _reason(error: Exception, repo_id: str, revision: str | None) -> str:
    """What went wrong and the way out, on one line."""
    from huggingface_hub import constants, errors

    at = f" at revision '{revision}'" if revision else ""
    if isinstance(error, errors.HFValidationError):
        return f"not a valid repository id ({_first_line(error)}); expected owner/name"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the repository is gated; ask for access on its page, then run 'hf auth login' or set HF_TOKEN, {_LOCAL}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one; check the name, run 'hf auth login' or set HF_TOKEN, {_LOCAL}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision}'"
    if isinstance(error, errors.LocalEntryNotFoundError):
        partly = " completely" if type(error).__name__ == "IncompleteSnapshotError" else ""
        cached = f"it is not{partly} in the cache {constants.HF_HUB_CACHE}{at}"
        if isinstance(error.__cause__, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
            return f"offline mode is on and {cached}; unset HF_HUB_OFFLINE to download it, {_LOCAL}"
        cause = error.__cause__ or error
        return f"cannot be reached ({_named(cause)}) and {cached}; check the network, {_LOCAL}"
    return f"fetching it{at} failed ({_named(error)}); try again, {_LOCAL}"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
