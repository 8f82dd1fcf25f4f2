"""Shared set-up of the tests: nothing reaches a model hub, and everything runs on the CPU."""

import gc
import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # for the tests of sharding
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module", autouse=True)
def few_programs_in_memory():
    """Drops a module's compiled programs at its end: thousands of them slow down all that is traced after."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def fewer_optimizations():
    """Programs are compiled faster, to slower code: for modules of many small ones."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def small():
    """A random model of two layers."""
    from checkpoints import random_model

    return random_model(3, num_hidden_layers=2, num_key_value_heads=2)


@pytest.fixture
def checkpoint(small, tmp_path):
    """A directory that loads, and its tensors."""
    from checkpoints import write_plain

    return tmp_path / "model", write_plain(tmp_path / "model", small)
