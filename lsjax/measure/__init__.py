"""Looking at a model: does it compute what transformers computes, and which layer is a good exit?"""

from lsjax.measure.agreement import Agreement, agreement
from lsjax.measure.parity import parity
from lsjax.measure.report import ParityReport, ParityRow

__all__ = ["Agreement", "ParityReport", "ParityRow", "agreement", "parity"]
