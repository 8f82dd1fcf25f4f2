"""What the command sets for its own process, before JAX is imported: where compiled programs are kept.

Only the command does, never ``import lsjax``: a program that uses the library configures JAX itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "LSJAX_COMPILATION_CACHE"
CACHE_BYTES = 1 << 30  # JAX removes what was used longest ago
_OFF = ("", "0", "off")
_SETTINGS = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(CACHE_BYTES),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # or JAX leaves out all that compiles within a second
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def keep_compiled_programs() -> None:
    """Has JAX keep compiled programs in a directory of the user's, so that the next run need not compile them.

    The directory is ``$LSJAX_COMPILATION_CACHE`` (empty, ``0`` or ``off``: none), else ``lsjax/compilation`` under
    ``$XDG_CACHE_HOME`` or ``~/.cache``. Whoever sets ``JAX_COMPILATION_CACHE_DIR`` has decided already.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or os.environ.get(CACHE_VARIABLE) in _OFF:
        return
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
    except OSError as error:
        if CACHE_VARIABLE in os.environ:  # asked for, so worth a word
            print(f"lsjax: warning: {CACHE_VARIABLE}={directory}: no cache there ({error})", file=sys.stderr)
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def cache_directory() -> Path:
    """Where the command keeps compiled programs."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "lsjax" / "compilation"
