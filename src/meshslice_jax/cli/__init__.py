"""The command line, one file a command.

A command parses text, sets up devices before JAX starts, calls the package and prints.
Exit codes: 0 done, 1 something is wrong with the result (an answer, a device), 2 the
command cannot be run as given.
"""

from meshslice_jax.cli.app import main as main
