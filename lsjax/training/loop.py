"""The loop: steps, looks at held-out text, checkpoints; killed at any moment, it goes on where it was."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

from lsjax.checks import check_depth, check_int, check_params, check_vocabulary
from lsjax.config import LlamaConfig
from lsjax.params import Params
from lsjax.training import record
from lsjax.training.batch import IGNORED, Batch
from lsjax.training.checkpoint import Checkpoints
from lsjax.training.evaluation import Drafts, HeldOut, evaluate, measure_drafts
from lsjax.training.packing import Rows
from lsjax.training.placement import Placement, on_one_device, place
from lsjax.training.recipe import Metrics, Recipe, TrainState, compiler_options, init_state, train_step


class TrainingDiverged(FloatingPointError):  # noqa: N818
    """A loss or gradient was no finite number; the message says at which step, and what is kept."""


class TrainingStopped(Exception):  # noqa: N818
    """The training was asked to stop before its end; it has a checkpoint of where it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """How a training is looked at and kept; nothing of it changes what is trained.

    Attributes:
        log_every: steps between two lines of the log.
        every: steps between two looks at held-out text, each with a checkpoint.
        rows: held-out rows to look at, at most.
        drafts_every: steps between two measurements of real drafts, a multiple of ``every``; 0: only at the end.
        exits: layers to draft with in these.
        num_speculations: drafts a round.
        prompts: held-out prompts to continue, at most.
        prompt_length: tokens of each, at most.
        max_new_tokens: new tokens of each.

    Raises:
        ValueError: says what was expected and what came.
    """

    log_every: int = 10
    every: int = 200
    rows: int = 128
    drafts_every: int = 0
    exits: tuple[int, ...] = ()
    num_speculations: int = 4
    prompts: int = 16
    prompt_length: int = 32
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "exits":
                least = 0 if field.name == "drafts_every" else 1
                check_int(field.name, getattr(self, field.name), least)
        object.__setattr__(self, "exits", tuple(check_int("exits", layer, 1) for layer in self.exits))
        if self.drafts_every % self.every:
            raise ValueError(f"drafts_every: expected a multiple of every = {self.every}, got {self.drafts_every}")


@dataclasses.dataclass(frozen=True)
class Training:
    """What :func:`train` returns.

    Attributes:
        params: of the last step, float32.
        held_out: each layer's loss and agreement at the last step.
        drafts: what real self-speculative decoding did at the last step, one for each exit that was asked for.
        best_step: the step of the checkpoint with the least held-out loss.
    """

    params: Params
    held_out: HeldOut
    drafts: tuple[Drafts, ...]
    best_step: int


def train(
    recipe: Recipe,
    params: Params | Callable[[], Params],
    rows: Rows,
    held_out: Rows,
    directory: str | os.PathLike[str],
    *,
    prompts: Sequence[np.ndarray] = (),
    watch: Watch | None = None,
    resume: bool | None = None,
    devices: Sequence[Any] | None = None,
    progress: bool | None = None,
    plots: bool = True,
    tell: Callable[[str], Any] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Training:
    """Trains a model, and keeps in a directory what is needed to go on after any interruption.

    The directory holds ``run.json`` (what is trained), ``log.jsonl`` (a line every few steps, and each look at held-out
    text), ``checkpoints/`` (orbax; the last and the best) and, where matplotlib is installed, ``loss.png``,
    ``agreement.png`` and ``drafts.png``. Going on from the last checkpoint gives the losses that the training would
    have had without the interruption, on CPUs to the last bit.

    Every device has all parameters and an equal share of each batch's rows.

    Args:
        recipe: what to train by.
        params: where to start from, or a function that makes it, which is called only where there is no checkpoint.
        rows: what to learn from.
        held_out: what to look at the model with, of the same row length.
        directory: absent, empty, or of a training that is to go on.
        prompts: int ``[length]`` each, held-out texts' beginnings, for :class:`Watch`'s exits.
        watch: how often to look, and at what.
        resume: None: go on where there is a checkpoint; True: there must be one; False: there must be none.
        devices: to train on; None: all that JAX sees.
        progress: whether to show a bar on stderr; None: where stderr is a terminal.
        plots: whether to draw.
        tell: called with a line about each look at held-out text.
        should_stop: asked after each step.

    Raises:
        ValueError: says what was expected and what came; the directory holds another training.
        FileExistsError: ``resume=False``, and the directory holds a training.
        FileNotFoundError: ``resume=True``, and it holds none.
        TrainingDiverged: a loss or a gradient is not finite.
        TrainingStopped: ``should_stop`` said so; a checkpoint has been written.

    Example:
        >>> rows, held_out = lsjax.training.pack(training, 256), lsjax.training.pack(others, 256)
        >>> recipe = lsjax.training.Recipe(steps=2000, batch_size=16, early_exit=lsjax.training.EarlyExitLoss())
        >>> done = lsjax.training.train(recipe, lsjax.init(config, key), rows, held_out, "runs/small")
        >>> lsjax.save(done.params, "small")
    """
    directory, watch = Path(directory).expanduser().absolute(), watch or Watch()
    placement = place(recipe, jax.devices() if devices is None else devices)
    directory.mkdir(parents=True, exist_ok=True)
    with Checkpoints(directory) as kept:
        goes_on = _goes_on(directory, kept.last_step, resume)
        start = None if goes_on else params if isinstance(params, Params) else params()
        del params
        config = record.read_config(directory) if start is None else _config_of(start)
        _check(config, rows, held_out, prompts, watch)
        run = record.describe(recipe, config, rows, held_out)
        if start is None:
            record.check_same(directory, run)
            state = kept.restore(placement.like(functools.partial(init_state, recipe), Params.abstract(config)))
        else:
            state = jax.device_put(init_state(recipe, start), placement.replicated)
            record.write_run(directory, run)
        del start
        with record.Log(directory, int(state.step)) as log:
            loop = _Loop(recipe, watch, placement, held_out, prompts, kept, log, _plotter(directory, plots), tell)
            return loop.run(state, rows, progress, should_stop)


def _goes_on(directory: Path, step: int | None, resume: bool | None) -> bool:
    """Whether there is a checkpoint to go on from, as ``resume`` has it."""
    there = step is not None and record.read_run(directory) is not None
    if resume is True and not there:
        raise FileNotFoundError(f"{directory}: expected a training with a checkpoint to go on from, found none")
    if resume is False and there:
        raise FileExistsError(f"{directory} holds a training of {step} steps: let it go on, or give another directory")
    return there


def _config_of(params: Params) -> LlamaConfig:
    check_params(params)
    return params.config


def _check(config: LlamaConfig, rows: Rows, held_out: Rows, prompts: Sequence[np.ndarray], watch: Watch) -> None:
    """That data and model fit each other."""
    length = rows.tokens.shape[1]
    if held_out.tokens.shape[1] != length:
        raise ValueError(
            f"held_out: expected rows of {length} tokens, as those to train on, got {held_out.tokens.shape}"
        )
    if length > config.trained_length:
        raise ValueError(f"rows: expected at most the model's {config.trained_length} positions, got {length}")
    for part in (rows, held_out):
        check_vocabulary(part.tokens, config)
        check_vocabulary(part.labels, config, part.labels != IGNORED)
    for layer in watch.exits:
        check_depth("exits", layer, config)
    if watch.exits and not len(prompts):
        raise ValueError("prompts: expected held-out prompts to draft after, got none")


@functools.lru_cache(maxsize=8)
def _compiled_step(recipe: Recipe, replicated: NamedSharding) -> Any:
    """The step as one program, which is given the state's memory."""
    return jax.jit(
        functools.partial(train_step, recipe),
        donate_argnums=0,
        out_shardings=replicated,
        compiler_options=compiler_options(recipe),
    )


def _plotter(directory: Path, wanted: bool) -> Callable[[], None]:
    """What draws the log; nothing where matplotlib is not installed."""
    try:
        from lsjax.training.plot import draw_all
    except ImportError:
        return lambda: None
    return (lambda: draw_all(directory)) if wanted else (lambda: None)


@dataclasses.dataclass
class _Loop:
    """One run of a training, from a state to the last step."""

    recipe: Recipe
    watch: Watch
    placement: Placement
    held_out: Rows
    prompts: Sequence[np.ndarray]
    kept: Checkpoints
    log: record.Log
    plot: Callable[[], None]
    tell: Callable[[str], Any] | None
    pending: tuple[int, Metrics] | None = None
    clock: tuple[int, float] | None = None  # the step and the time of the last line of the log

    def run(
        self, state: TrainState, rows: Rows, progress: bool | None, should_stop: Callable[[], bool] | None
    ) -> Training:
        recipe, begin = self.recipe, int(state.step)
        step = _compiled_step(recipe, self.placement.replicated)
        looked = None
        hidden = None if progress is None else not progress
        with tqdm(total=recipe.steps, initial=begin, unit="step", disable=hidden) as bar:
            for done in range(begin + 1, recipe.steps + 1):
                batch = rows.batch(done - 1, recipe.batch_size, recipe.seed)
                state, metrics = step(state, jax.device_put(batch, self.placement.rows))
                self._settle(bar)  # the step before, while this one runs
                self.pending = done, metrics
                stop = should_stop is not None and should_stop()
                if due := done % self.watch.every == 0 or done == recipe.steps:
                    self._settle(bar)
                    looked = self._look(state, done)
                    self.kept.save(state, float(looked[0].losses[-1]))
                    self.plot()
                bar.update()
                if stop and done < recipe.steps:
                    self._settle(bar)
                    if not due:
                        self.log.bring_to_disk()
                        self.kept.save(state)
                    raise TrainingStopped(
                        f"stopped after step {done} of {recipe.steps}, of which there is a checkpoint"
                    )
        held_out, drafts = looked or self._measure(state, recipe.steps)  # where all steps had been done before
        best = self.kept.best_step
        return Training(on_one_device(state.params), held_out, drafts, recipe.steps if best is None else best)

    def _settle(self, bar: Any) -> None:
        """Waits for a step's numbers, and looks at them."""
        if self.pending is None:
            return
        (done, metrics), self.pending = self.pending, None
        found = {name: np.asarray(value).item() for name, value in vars(metrics).items()}
        if not all(map(math.isfinite, found.values())):
            self._diverged(done, f"the loss is {found['loss']} and the norm of its gradient {found['grad_norm']}")
        bar.set_postfix(loss=f"{found['loss']:.3f}", refresh=False)
        if done % self.watch.log_every == 0 or done in (1, self.recipe.steps):
            now, before = time.perf_counter(), self.clock
            self.clock = done, now
            seconds = None if before is None else (now - before[1]) / (done - before[0])  # the first one compiles
            self.log.write("step", done, **found, seconds_per_step=seconds)

    def _look(self, state: TrainState, done: int) -> tuple[HeldOut, tuple[Drafts, ...]]:
        """Measures, logs and tells."""
        held_out, drafts = self._measure(state, done)
        losses = held_out.losses.tolist()
        if not math.isfinite(losses[-1]):
            self._diverged(done, f"the held-out loss is {losses[-1]}")
        self.log.write("held_out", done, losses=losses, agreement=held_out.agreement.tolist(), labels=held_out.labels)
        for found in drafts:
            self.log.write("drafts", done, **dataclasses.asdict(found))
        self.log.bring_to_disk()
        self.clock = None
        if self.tell is not None:
            exits = "".join(
                f"; exit {found.exit_layer}: {found.acceptance_rate:.1%} of the drafts accepted, "
                f"{found.tokens_per_round:.2f} tokens a round"
                for found in drafts
            )
            self.tell(f"step {done}: held-out loss {losses[-1]:.4f}{exits}")
        return held_out, drafts

    def _measure(self, state: TrainState, done: int) -> tuple[HeldOut, tuple[Drafts, ...]]:
        watch, recipe = self.watch, self.recipe
        batches = (jax.device_put(batch, self.placement.rows) for batch in self._held_out_batches())
        held_out = evaluate(state.params, batches, chunk=recipe.loss_chunk or None, dtype=recipe.dtype)
        due = done == recipe.steps or (watch.drafts_every and done % watch.drafts_every == 0)
        if not (due and watch.exits):
            return held_out, ()
        params = jax.tree.map(lambda leaf: leaf.astype(recipe.dtype), on_one_device(state.params))
        options = {"num_speculations": watch.num_speculations, "max_new_tokens": watch.max_new_tokens}
        return held_out, measure_drafts(params, self.prompts, exits=watch.exits, **options)

    def _held_out_batches(self) -> Iterator[Batch]:
        """Held-out rows from all over, as many at a time as a step reads; what fills up the last has no labels."""
        size, count = self.recipe.batch_size // self.recipe.accumulation, min(len(self.held_out), self.watch.rows)
        chosen = np.linspace(0, len(self.held_out) - 1, count).round().astype(int)
        for first in range(0, count, size):
            some = chosen[first : first + size]
            batch = self.held_out.take(np.resize(some, size))
            batch.labels[len(some) :] = IGNORED
            yield batch

    def _diverged(self, done: int, what: str) -> NoReturn:
        last = self.kept.last_step
        kept = "there is no checkpoint yet" if last is None else f"the last checkpoint is of step {last}"
        raise TrainingDiverged(
            f"step {done} of {self.recipe.steps}: {what}; stopped, {kept}. A smaller learning_rate, more warmup_steps "
            "or a smaller clip_norm may help"
        )
