"""Files that appear whole or not at all, in whatever place they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from neap._files import whole


def fill(path: Path, text: str) -> None:
    with whole(path) as partial:
        Path(partial).write_text(text)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for text in ("first", "second"):
        fill(path, text)
        assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o644 & ~current_umask()
    with pytest.raises(ValueError, match="mine"), whole(path) as partial:
        Path(partial).write_text("half")
        raise ValueError("mine")
    assert path.read_text() == "second" and os.listdir(tmp_path) == ["out"]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "behind").write_text("old")
    (tmp_path / "link").symlink_to("behind")
    fill(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "behind").read_text() == "new"


def test_a_pipe_stays_a_pipe_and_gets_the_content(
    tmp_path: Path, pipe: tuple[Path, Callable[[], str]]
) -> None:
    path, content = pipe
    fill(path, "through")
    assert content() == "through" and path.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_what_cannot_be_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "out"):
        with pytest.raises(OSError):
            fill(path, "text")
    assert not os.listdir(tmp_path)


def test_no_planted_file_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    (tmp_path / f"out.{bytes(8).hex()}.tmp").symlink_to("mine")
    with pytest.raises(FileExistsError):
        fill(tmp_path / "out", "text")
    assert (tmp_path / "mine").read_text() == "mine"
