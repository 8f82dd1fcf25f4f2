"""Looking at a model: does it compute what transformers computes, which layer is a good exit, what is accepted?"""

from lsjax.measure.agreement import Agreement, agreement
from lsjax.measure.calibration import Acceptance, Calibration, calibrate, measure_acceptance, shortest_cycle
from lsjax.measure.parity import parity
from lsjax.measure.report import ParityReport, ParityRow
from lsjax.measure.synthetic import agreeing_params, save_synthetic, scale_deep_layers

__all__ = [
    "Acceptance",
    "Agreement",
    "Calibration",
    "ParityReport",
    "ParityRow",
    "agreeing_params",
    "agreement",
    "calibrate",
    "measure_acceptance",
    "parity",
    "save_synthetic",
    "scale_deep_layers",
    "shortest_cycle",
]
