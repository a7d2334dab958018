"""One set-up for all tests: 16 emulated CPU devices, strict dtype promotion.

Warnings are errors; the exceptions and their reasons are in pyproject.toml.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: no look for accelerators

import hypothesis
import jax

NUM_DEVICES = 16

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Most of the time of a test is compilation; what it checks does not depend on how fast the
# machine code is.
jax.config.update("jax_disable_most_optimizations", True)

# A busy machine is no failure: examples have no deadline.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_sessionstart(session):
    """Stops at once where something started JAX with other devices before us."""
    found = jax.devices()
    if len(found) != NUM_DEVICES or found[0].platform != "cpu":
        raise RuntimeError(f"tests need {NUM_DEVICES} CPU devices, JAX shows {found}")
