"""Wall time of several calls, taken in turns: what is compared meets the same moments of the machine."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lsjax.checks import check_int


@dataclasses.dataclass(frozen=True)
class Spread:
    """Values of several repetitions, in their order.

    Attributes:
        values: at least one number.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The 25th and 75th percentile, interpolated linearly; within the smallest and largest value."""
        low, high = np.percentile(self.values, (25, 75))
        return float(low), float(high)

    def map(self, function: Callable[[float], float]) -> Spread:
        """Each value through a function: seconds to tokens a second, say."""
        return Spread(tuple(map(function, self.values)))

    def to_dict(self) -> dict[str, Any]:
        """The numbers for JSON."""
        return {"median": self.median, "quartiles": list(self.quartiles), "values": list(self.values)}


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """One call's times.

    Attributes:
        first_seconds: of its first call, compilation included.
        seconds: of the calls after warm-up, one a repetition.
        result: what the first call returned.
    """

    first_seconds: float
    seconds: Spread
    result: Any = None

    @property
    def median(self) -> float:
        """The median of ``seconds``."""
        return self.seconds.median

    @property
    def compile_seconds(self) -> float:
        """What the first call took longer than the median one, which is compilation and other first-time work; or 0."""
        return max(self.first_seconds - self.median, 0.0)


class Timings(Mapping[Any, Timing]):
    """What :func:`time_in_turns` returns: a :class:`Timing` for each name."""

    def __init__(self, timings: Mapping[Any, Timing]) -> None:
        self._timings = dict(timings)

    def __getitem__(self, name: Hashable) -> Timing:
        return self._timings[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._timings)

    def __len__(self) -> int:
        return len(self._timings)

    def ratio(self, over: Hashable, under: Hashable) -> Spread:
        """Seconds of one call over those of another, repetition by repetition.

        Both calls of a repetition are neighbours in time, so a slow moment of the machine cancels. How many times as
        fast as ``a`` is ``b``? ``ratio("a", "b").median``.
        """
        pairs = zip(self[over].seconds.values, self[under].seconds.values, strict=True)
        return Spread(tuple(a / b for a, b in pairs))

    def total(self, names: Iterable[Hashable]) -> Timing:
        """Several calls as if they were one: sums, repetition by repetition. Its result is the list of theirs."""
        parts = [self[name] for name in names]
        return Timing(
            first_seconds=sum(part.first_seconds for part in parts),
            seconds=Spread(tuple(map(sum, zip(*(part.seconds.values for part in parts), strict=True)))),
            result=[part.result for part in parts],
        )


def time_in_turns(
    calls: Mapping[Any, Callable[[], Any]],
    *,
    repetitions: int = 5,
    warm_ups: int = 1,
    progress: Callable[[Any, int], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Times several calls in turns, after warm-up.

    First every call is made ``warm_ups`` times. Then, once a repetition, each is made once, in the order given: a
    machine that is slow for a while is slow for all of them. A call's time ends when its result is there: JAX's arrays
    anywhere in a pytree are waited for, and so is torch's CUDA device, where torch is in use.

    Args:
        calls: functions of no arguments, by name; names are any hashable values.
        repetitions: timed calls of each, at least 1.
        warm_ups: calls of each that do not count, at least 1; the first of them is where JAX compiles.
        progress: called before each call with its name and its repetition, 0 for warm-up; not timed.
        clock: seconds, for tests.

    Raises:
        ValueError: no calls, or fewer than one repetition or warm-up.

    Example:
        >>> found = time_in_turns({"old": lambda: f(x), "new": lambda: g(x)}, repetitions=7)
        >>> found["new"].median, found["new"].compile_seconds, found.ratio("old", "new").median
    """
    repetitions, warm_ups = check_int("repetitions", repetitions, 1), check_int("warm_ups", warm_ups, 1)
    if not calls:
        raise ValueError("calls: expected at least one, got none")

    def run(name: Any, repetition: int) -> tuple[float, Any]:
        if progress is not None:
            progress(name, repetition)
        start = clock()
        result = _wait(calls[name]())
        return clock() - start, result

    first = {name: run(name, 0) for name in calls}
    for _ in range(warm_ups - 1):
        for name in calls:
            run(name, 0)
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for repetition in range(1, repetitions + 1):
        for name in calls:
            seconds[name].append(run(name, repetition)[0])
    return Timings(
        {name: Timing(first[name][0], Spread(tuple(seconds[name])), result=first[name][1]) for name in calls}
    )


def _wait(result: Any) -> Any:
    """The result, once it is computed; what is no array of JAX's is there already, except on torch's GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return jax.block_until_ready(result)
