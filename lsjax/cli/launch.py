"""What the command sets for its own process, before JAX is imported: where compiled programs are kept.

Only the command does, never ``import lsjax``: a program that uses the library configures JAX itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import time
from pathlib import Path

CACHE_VARIABLE = "LSJAX_COMPILATION_CACHE"
CACHE_BYTES = 1 << 30
_OFF = ("", "0", "off")
_SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # or JAX leaves out all that compiles within a second
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# JAX's warning; the program's name, which also begins the names of its files, and the reason.
_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL)


@dataclasses.dataclass
class KeptPrograms:
    """The directory in which JAX keeps this process's compiled programs.

    Its size is bounded here: JAX's own bound (``jax_compilation_cache_max_size``) needs a second file beside each, and
    in jax 0.10 nothing is written any more once a killed process has left one without the other.

    Attributes:
        directory: absolute; JAX makes it with the first program.
        asked_for: whether the user named it, so that trouble with it is worth a word.
        start: seconds since the epoch; what is younger was written by this process or beside it.
    """

    directory: Path
    asked_for: bool
    start: float = dataclasses.field(default_factory=time.time)

    def take_warning(self, program: str, text: str) -> bool:
        """Whether a warning is JAX's about this directory; the first one is told, if the user named the directory.

        Programs that cannot be read are removed, since JAX would never write them anew; so is what is left of one that
        could not be written.
        """
        found = _TROUBLE.match(text)
        if found is None:
            return False
        action, name, reason = found.groups()
        for path in self._files(f"{name}-"):
            with contextlib.suppress(OSError):
                if action == "reading" or path.stat().st_mtime >= self.start:
                    path.unlink()
        if self.asked_for:
            about = f"{CACHE_VARIABLE}={self.directory}: trouble in {action} compiled programs ({reason})"
            print(f"{program}: warning: {' '.join(about.split())}", file=sys.stderr)
            self.asked_for = False
        return True

    def drop_oldest(self, limit: int = CACHE_BYTES) -> None:
        """Removes what was used longest ago until no more than ``limit`` bytes are kept."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):  # another process may be faster
                status = path.stat()
                found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
        excess = sum(size for _, size, _ in found) - limit
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= size

    def _files(self, start: str = "") -> list[Path]:
        try:
            return [path for path in self.directory.iterdir() if path.name.startswith(start) and path.is_file()]
        except OSError:
            return []


def keep_compiled_programs() -> KeptPrograms | None:
    """Has JAX keep compiled programs in a directory of the user's, so that the next run need not compile them.

    The directory is ``$LSJAX_COMPILATION_CACHE`` (empty, ``0`` or ``off``: none), else ``lsjax/compilation`` under
    ``$XDG_CACHE_HOME`` or ``~/.cache``; not ``$LSJAX_CACHE``, which several users may share: whoever can write into
    this directory decides what others run. Whoever sets ``JAX_COMPILATION_CACHE_DIR`` has decided already.

    JAX makes a program's name from its code, its options, its own version and the processor's features, so a directory
    may serve different machines.

    Returns:
        the directory; None where there is none, or where it is not the command's to look after.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or os.environ.get(CACHE_VARIABLE) in _OFF:
        return None
    try:
        directory = cache_directory()
    except RuntimeError:  # a user without a home
        return None
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    return KeptPrograms(directory, asked_for=CACHE_VARIABLE in os.environ)


def cache_directory() -> Path:
    """Where the command keeps compiled programs.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").absolute() / "lsjax" / "compilation"
