"""Looking at a model: does it compute what transformers computes, which layer is a good exit, and how fast is it?"""

from lsjax.measure.agreement import Agreement, agreement
from lsjax.measure.bandwidth import read_bandwidth, step_bytes
from lsjax.measure.benchmark import benchmark
from lsjax.measure.benchmark_report import BenchmarkReport, StrategyReport
from lsjax.measure.calibration import Acceptance, Calibration, calibrate, measure_acceptance, shortest_cycle
from lsjax.measure.parity import parity
from lsjax.measure.report import ParityReport, ParityRow
from lsjax.measure.steps import RoundCosts, round_costs
from lsjax.measure.synthetic import agreeing_params, save_synthetic, scale_deep_layers
from lsjax.measure.timing import Spread, Timing, Timings, time_in_turns

__all__ = [
    "Acceptance",
    "Agreement",
    "BenchmarkReport",
    "Calibration",
    "ParityReport",
    "ParityRow",
    "RoundCosts",
    "Spread",
    "StrategyReport",
    "Timing",
    "Timings",
    "agreeing_params",
    "agreement",
    "benchmark",
    "calibrate",
    "measure_acceptance",
    "parity",
    "read_bandwidth",
    "round_costs",
    "save_synthetic",
    "scale_deep_layers",
    "shortest_cycle",
    "step_bytes",
    "time_in_turns",
]
