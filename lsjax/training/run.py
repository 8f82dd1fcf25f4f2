"""A whole training from its settings: tokenizer, data, model, the loop, and the result as a model to load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from lsjax.io import load, save
from lsjax.params import init
from lsjax.text.tokenizer import load_tokenizer
from lsjax.training.checkpoint import load_trained
from lsjax.training.documents import find_files, hold_out, read_documents, take_prompts
from lsjax.training.loop import train
from lsjax.training.packing import Rows, pack
from lsjax.training.record import forget_training
from lsjax.training.settings import Settings

MODEL = "model"


def run(
    settings: Settings,
    *,
    resume: bool | None = None,
    tell: Callable[[str], Any] | None = None,
    progress: bool | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Path:
    """Trains as settings say, or goes on, and writes the result.

    Args:
        settings: of :func:`~lsjax.training.settings.read_settings`.
        resume: None: go on where there is a checkpoint; True: there must be one; False: what is there is removed.
        tell: called with lines for a person.
        progress: whether to show bars on stderr; None: where stderr is a terminal.
        should_stop: asked after each step.

    Returns:
        the directory of the trained model, with its tokenizer.

    Raises:
        as :func:`~lsjax.training.loop.train`, ``lsjax.load`` and ``lsjax.save``, and what builds settings.

    Example:
        >>> settings = lsjax.training.read_settings(Path("small.toml"))
        >>> params = lsjax.load(lsjax.training.run(settings))
    """
    say = tell or (lambda text: None)
    directory = Path(settings.out)
    if resume is False:
        forget_training(directory)
        resume = None
    source = settings.tokenizer or settings.init
    tokenizer = None if source is None else _tokenizer(source, required=settings.tokenizer is not None)
    if settings.init is None:
        start = functools.partial(init, settings.config(tokenizer), jax.random.key(settings.recipe.seed))
    else:
        start = functools.partial(load, settings.init, progress=progress)
    rows, held_out, prompts = _read(settings, tokenizer, say, progress)
    done = train(
        settings.recipe,
        start,
        rows,
        held_out,
        directory,
        prompts=prompts,
        watch=settings.watch,
        resume=resume,
        progress=progress,
        tell=tell,
        should_stop=should_stop,
    )
    params = done.params if settings.result == "last" else load_trained(directory, "best")
    save(params, directory / MODEL, tokenizer=tokenizer)
    return directory / MODEL


def _tokenizer(source: str, *, required: bool) -> Any:
    try:
        return load_tokenizer(source)
    except FileNotFoundError:
        if required:
            raise
        return None  # a model without one is trained on ids


def _read(
    settings: Settings, tokenizer: Any, say: Callable[[str], Any], progress: bool | None
) -> tuple[Rows, Rows, list[Any]]:
    data, seed = settings.data, settings.recipe.seed
    paths = find_files((*data.files, *data.held_out_files))
    hidden = None if progress is None else not progress
    total = sum(path.stat().st_size for path in paths)
    with tqdm(desc="reading", total=total, unit="B", unit_scale=True, disable=hidden) as bar:
        documents = read_documents(data.files, tokenizer, progress=bar.update)
        if data.held_out_files:
            others = read_documents(data.held_out_files, tokenizer, progress=bar.update)
        else:
            documents, others = hold_out(documents, data.held_out, seed)
    rows, held_out = pack(documents, data.sequence_length), pack(others, data.sequence_length)
    steps = len(rows) / settings.recipe.batch_size
    say(
        f"{len(documents)} documents, {rows.num_labels:,} tokens to learn in {len(rows)} rows of "
        f"{data.sequence_length} ({steps:.1f} steps an epoch); held out: {len(others)} documents, "
        f"{held_out.num_labels:,} tokens" + (f"; {rows.truncated} examples cut off" if rows.truncated else "")
    )
    watch = settings.watch
    return rows, held_out, take_prompts(others, watch.prompts, watch.prompt_length, seed)
