"""How much memory was used at most."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

_STATUS = Path("/proc/self/status")


def host_peak_bytes() -> int | None:
    """The largest resident size of this process so far; None where the system does not tell."""
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


def device_peak_bytes(device: Any = None) -> int | None:
    """The most memory that was in use on a device at a time, since the process began; None where JAX does not say.

    Args:
        device: one of ``jax.devices()``; None: the first.
    """
    device = jax.devices()[0] if device is None else device
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def program_bytes(compiled: jax.stages.Compiled) -> int | None:
    """What a compiled program holds on each device: arguments, results and temporaries; None where XLA does not say.

    Args:
        compiled: of ``jax.jit(function).lower(...).compile()``.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes
