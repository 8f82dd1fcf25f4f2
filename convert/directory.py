"""A directory that appears whole or not at all, even if the process is killed while it writes.

Its files are written into a hidden directory beside it, ``.NAME.lsjax-xxxxxxxx``, brought to disk, and then renamed.
The writer holds a lock on that directory. A writer that is killed leaves it behind without a lock; the next one to
write the same ``NAME`` removes it, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Gives a directory to write into, which takes the place of ``target`` once the block ends without an error.

    Args:
        target: an absolute path; absent, an empty directory, or one that may be replaced. Its former contents go only
            when the new ones are there. (Between the two renames that this takes, a process that is killed leaves no
            ``target``; the next writer first brings the former contents back.)
        is_ours: whether what a directory holds may be replaced.

    Raises:
        FileExistsError: ``target`` is a file, or a directory that may not be replaced.
        OSError: it cannot be written; what was there is there still.
    """
    absent = [parent for parent in target.parents if not parent.exists()]
    new = lock = None
    try:
        with _explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(target)
        check_target(target, is_ours)
        with _explained(target):
            new, lock = _make_beside(target)
        with _explained(target, new):
            yield new
            for path in (*new.iterdir(), new):
                _bring_to_disk(path)
            _rename(new, target)
            _bring_to_disk(target.parent)
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if not target.exists():
            for parent in absent:  # the innermost first
                with contextlib.suppress(OSError):
                    parent.rmdir()


def check_target(target: Path, is_ours: Callable[[Path], bool]) -> None:
    """Refuses to replace what is not ours.

    Raises:
        FileExistsError: ``target`` is a file, or a directory that holds something and is not ours.
    """
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target}: expected a directory, got a file")
    if target.is_dir() and any(target.iterdir()) and not is_ours(target):
        there = ", ".join(sorted(entry.name for entry in target.iterdir())[:8])
        raise FileExistsError(f"{target} holds what lsjax did not write, and is left alone: {there}")


@contextlib.contextmanager
def _explained(target: Path, written: Path | None = None) -> Iterator[None]:
    """Puts the target in front of what the system says about writing it, or about files within ``written`` alone."""
    try:
        yield
    except OSError as error:
        if written and error.filename and written not in (Path(error.filename), *Path(error.filename).parents):
            raise  # something else could not be read
        text = f"{target} cannot be written ({error.strerror or error}); nothing was changed"
        raise (OSError(text) if error.errno is None else OSError(error.errno, text)) from error


def _make_beside(target: Path) -> tuple[Path, int | None]:
    while True:
        new = target.with_name(f".{target.name}.lsjax-{uuid.uuid4().hex[:8]}")
        new.mkdir()
        lock = _lock(new)
        if new.is_dir():  # else another writer took it for a leftover, before it was locked
            return new, lock


def _lock(directory: Path) -> int | None:
    """A lock that ends with this process; None where another holds it or the system has none."""
    if sys.platform == "win32":
        return None
    import fcntl

    file = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _remove_leftovers(target: Path) -> None:
    """Removes what killed writers of this target left; first brings back what they had moved away."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.lsjax-[0-9a-f]{{8}}")
    for new in list(target.parent.iterdir()):
        if not ours.fullmatch(new.name.removesuffix(".old")) or new.is_symlink() or not new.is_dir():
            continue
        with contextlib.suppress(OSError):  # another writer may be faster
            if new.name.endswith(".old"):
                if not new.with_name(new.name.removesuffix(".old")).exists():
                    _bring_back(new, target)
            elif (lock := _lock(new)) is not None:
                _bring_back(new.with_name(f"{new.name}.old"), target)
                shutil.rmtree(new, ignore_errors=True)
                os.close(lock)


def _bring_back(old: Path, target: Path) -> None:
    if old.is_dir() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _rename(new: Path, target: Path) -> None:
    old = new.with_name(f"{new.name}.old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _bring_to_disk(path: Path) -> None:
    if sys.platform == "win32":
        return  # it has no such call for a directory
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
