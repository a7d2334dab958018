"""Overlap measured over a real, slow wire: processes in namespaces with shaped links.

On emulated devices in one process communication is a copy in memory, so nothing can be
said about hiding it. Here every chip is a process of its own, its link is a token bucket,
and gloo sends over TCP: communication takes time that the processor does not need. What is
measured at each rate, in one interleaved run:

    compute         the local products alone, in which nothing is sent
    communication   the moves of the Collective algorithm alone, with no product
    gspmd           XLA's own partitioning, the base of all ratios
    meshslice       S slices, each as few blocks as there can be (on a square mesh one in a
                    shard); slices of many strided blocks, with the weight as it is and stored
                    in slices; and the control: slices with nothing side by side
    collective, wang, summa, cannon

The share of communication that is hidden is (compute + communication - time) over the
smaller of the two: 1 is all that could be.

XLA:CPU runs what does not wait for anything side by side, under conditions:

  * the order of collectives must be held, or all of one operand's gathers come first, and
    what a product still reads must not be gathered over: `gather_order="tied"` sees to both
    (`algorithms.in_line`); "free" stands beside it;
  * slices must be unrolled, and more than two: small programs run one step at a time.

    namespaces    the network
    alone         compute and communication by themselves
    variants      what is measured
    rates         the rate at which communication takes so and so much of compute's time
    record        a line of the results, their files
    program       what each process runs
    run           what starts them
"""

from meshslice_jax.bench.wire.namespaces import lacking as lacking
from meshslice_jax.bench.wire.options import WireOptions as WireOptions
from meshslice_jax.bench.wire.options import parse_rates as parse_rates
from meshslice_jax.bench.wire.record import Record as Record
from meshslice_jax.bench.wire.record import label as label
from meshslice_jax.bench.wire.record import read_records as read_records
from meshslice_jax.bench.wire.record import write_plot as write_plot
from meshslice_jax.bench.wire.run import run as run
