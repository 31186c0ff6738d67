"""A model argument becomes a directory, or one line that says what was tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from minimax_jax.errors import CheckpointError
from minimax_jax.hub import resolve_model

REPO = "owner/some-model"


def refusal(name: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "some-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(REPO) == Path(REPO)  # a directory goes before a repository of that name
    assert resolve_model("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("name", ["./missing", "../missing", "/no/such", "~/no-such-directory", "a/b/c", "missing/"])
def test_a_path_that_does_not_exist_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("asked the Hub"))
    assert refusal(name) == f"model '{name}': no such directory"


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "is a file; pass the directory" in refusal(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["", "gpt2", "owner/", "own er/model", "owner/model?x"])
def test_what_is_neither_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, AssertionError("asked the Hub"))
    assert f"model '{name}'" in refusal(name)


def test_an_invalid_repository_id_is_named() -> None:
    assert "not a valid repository id" in refusal("owner/a..b")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None = None) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def http_error(kind: Any) -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=403)
    error: Exception = kind("403 Client Error.\n\nmore lines", response=response)
    return error


@pytest.mark.parametrize(
    ("error", "cause", "expected"),
    [
        (errors.LocalEntryNotFoundError("x\ny"), ConnectionError("[Errno -2] Name or service not known"),
         "cannot be reached (ConnectionError: [Errno -2] Name or service not known) and it is not in the cache"),
        (errors.LocalEntryNotFoundError("x"), errors.OfflineModeIsEnabled("off"), "offline mode is on and it is not"),
        (http_error(errors.RepositoryNotFoundError), None, "no such repository, or a private one"),
        (http_error(errors.GatedRepoError), None, "is gated; ask for access"),
        (http_error(errors.RevisionNotFoundError), None, "has no revision 'v9'"),
        (http_error(errors.HfHubHTTPError), None, "failed (HfHubHTTPError: 403 Client Error.)"),
        (OSError(28, "No space left on device"), None, "failed (OSError: [Errno 28] No space left on device)"),
        (TimeoutError(), None, "failed (TimeoutError: no message)"),
    ],
    ids=["no network", "offline", "unknown", "gated", "revision", "server", "disk full", "timeout"],
)  # fmt: skip
def test_a_failure_is_one_line_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None, expected: str
) -> None:
    fail_with(monkeypatch, error, cause)
    message = refusal(REPO, "v9")
    assert message.startswith(f"model '{REPO}' is no directory here, and from the Hub: ")
    assert expected in message


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(REPO)


def cached(home: Path, *names: str) -> Path:
    """A snapshot as the Hub's cache lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = home / "hub" / "models--owner--some-model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


@pytest.mark.parametrize("is_cached", [False, True])
def test_offline_mode_uses_the_cache_and_only_that(tmp_path: Path, is_cached: bool) -> None:
    """In a process of its own: the switch is read when `huggingface_hub` is imported."""
    snapshot = cached(tmp_path, "config.json") if is_cached else None
    code = (
        "import sys\n"
        "from minimax_jax.errors import MinimaxError\n"
        "from minimax_jax.hub import resolve_model\n"
        "try:\n"
        f"    print(resolve_model({REPO!r}))\n"
        "except MinimaxError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    if snapshot is not None:
        assert Path(done.stdout.strip()).resolve() == snapshot.resolve()
    else:
        assert f"offline mode is on and it is not in the cache {tmp_path / 'hub'}" in done.stdout
        assert "unset HF_HUB_OFFLINE" in done.stdout


def test_only_the_top_of_a_repository_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(REPO, "v1") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == (REPO, "v1")
    wanted = [
        "config.json", "generation_config.json", "model.safetensors.index.json", "model-00000-of-00126.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    ]  # fmt: skip
    others = ["README.md", "figures/a.png", "original/model.safetensors", "modeling_minimax_m2.py", "pytorch_model.bin"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *others], **patterns)) == wanted
