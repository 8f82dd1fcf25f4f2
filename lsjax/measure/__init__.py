"""Looking at a model: does it compute what transformers computes, which layer is a good exit, and how fast is it?"""

from lsjax.measure.agreement import Agreement, agreement
from lsjax.measure.bandwidth import read_bandwidth, step_bytes
from lsjax.measure.benchmark import benchmark
from lsjax.measure.benchmark_report import BenchmarkReport, StrategyReport
from lsjax.measure.parity import parity
from lsjax.measure.report import ParityReport, ParityRow
from lsjax.measure.timing import Spread, Timing, Timings, time_in_turns

__all__ = [
    "Agreement",
    "BenchmarkReport",
    "ParityReport",
    "ParityRow",
    "Spread",
    "StrategyReport",
    "Timing",
    "Timings",
    "agreement",
    "benchmark",
    "parity",
    "read_bandwidth",
    "step_bytes",
    "time_in_turns",
]
