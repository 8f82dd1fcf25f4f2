"""Training exits: the LayerSkip recipe (arXiv 2404.16710), and a loop that makes models whose drafts are accepted."""

from lsjax.training.batch import IGNORED, Batch
from lsjax.training.checkpoint import load_trained
from lsjax.training.curriculum import EarlyExitLoss
from lsjax.training.documents import Document, hold_out, read_documents, take_prompts
from lsjax.training.dropout import LayerDropout
from lsjax.training.evaluation import Drafts, HeldOut, evaluate, measure_drafts
from lsjax.training.loop import Training, TrainingDiverged, TrainingStopped, Watch, train
from lsjax.training.optimizer import Optimizer
from lsjax.training.packing import Rows, pack
from lsjax.training.recipe import (
    Metrics,
    Recipe,
    TrainState,
    compiler_options,
    exit_weights,
    gradients,
    init_state,
    train_step,
)
from lsjax.training.record import forget_training, read_log
from lsjax.training.run import run
from lsjax.training.settings import Data, Settings, read_settings

__all__ = [
    "IGNORED",
    "Batch",
    "Data",
    "Document",
    "Drafts",
    "EarlyExitLoss",
    "HeldOut",
    "LayerDropout",
    "Metrics",
    "Optimizer",
    "Recipe",
    "Rows",
    "Settings",
    "TrainState",
    "Training",
    "TrainingDiverged",
    "TrainingStopped",
    "Watch",
    "compiler_options",
    "evaluate",
    "exit_weights",
    "forget_training",
    "gradients",
    "hold_out",
    "init_state",
    "load_trained",
    "measure_drafts",
    "pack",
    "read_documents",
    "read_log",
    "read_settings",
    "run",
    "take_prompts",
    "train",
    "train_step",
]
