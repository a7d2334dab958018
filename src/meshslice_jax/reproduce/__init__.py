"""`meshslice reproduce`: the paper's numbers from one calibration, with what is missed."""

from meshslice_jax.reproduce.peers import WangForm as WangForm
from meshslice_jax.reproduce.plot import write_plots as write_plots
from meshslice_jax.reproduce.row import COLUMNS as COLUMNS
from meshslice_jax.reproduce.row import Row as Row
from meshslice_jax.reproduce.row import compared as compared
from meshslice_jax.reproduce.row import comparison_table as comparison_table
from meshslice_jax.reproduce.row import write_csv as write_csv
from meshslice_jax.reproduce.row import write_json as write_json
from meshslice_jax.reproduce.rows import reproduce as reproduce
