"""How much memory was used at most."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def host_peak_bytes() -> int | None:
    """The largest resident size of this process so far, or since :func:`reset_host_peak`; None where none is told."""
    try:
        return 1024 * int(_STATUS.read_text().partition("VmHWM:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_host_peak() -> bool:
    """Lets :func:`host_peak_bytes` begin anew, at what the process holds now; False where that cannot be (off Linux).

    It is the process's own counter, so other readers of it see the new beginning, too.
    """
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def device_peak_bytes(device: Any = None) -> int | None:
    """The most memory that was in use on a device at a time, since the process began; None where JAX does not say.

    Args:
        device: one of ``jax.devices()``; None: the first.
    """
    device = jax.devices()[0] if device is None else device
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
