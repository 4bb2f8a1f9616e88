"""One run at a time in a folder, and nothing left of those that are gone."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from listening import logged

from gossip.lab.experiments.run_folder import LOCK_FILE, FolderError, lock


def test_lock_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    for _ in range(2):
        with lock(tmp_path):
            assert (tmp_path / LOCK_FILE).exists()
        assert not list(tmp_path.iterdir())
    with pytest.raises(ArithmeticError), lock(tmp_path):
        raise ArithmeticError
    with lock(tmp_path):
        pass


def test_lock_of_a_file_that_its_owner_removes_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, calls = fcntl.flock, []

    def flock_when_the_first_has_ended(file: int, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / LOCK_FILE).unlink()
            (tmp_path / LOCK_FILE).touch()  # of a third
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_when_the_first_has_ended)
    with lock(tmp_path), pytest.raises(FolderError, match="is in use by"), lock(tmp_path):
        pytest.fail("two hold it")
    assert len(calls) == 3  # the first file was gone, the second was locked, the other run was refused


def test_lock_warns_where_the_file_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with logged() as texts, lock(tmp_path):
        pass
    assert texts == [f"{tmp_path} is on a file system without locks: nothing keeps another run out of it"]
