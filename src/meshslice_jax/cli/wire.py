"""`meshslice bench --wire`: processes over real, slow links."""

import tempfile
from pathlib import Path

import typer

from meshslice_jax.bench import wire
from meshslice_jax.cli import common
from meshslice_jax.cli.tables import print_table
from meshslice_jax.mesh import parse_mesh_shape

#: Options of the benchmark that mean nothing over the wire.
NOT_OVER_THE_WIRE = tuple(
    "devices platform model layers batch seq_len dtype plan scale hardware".split()
)
COLUMNS = ("flow", "pass", "comm/comp", "variant", "ms", "/gspmd", "min-max", "hidden")


def read_options(context: typer.Context, rates: str) -> wire.WireOptions:
    """What the command line asks for; what it does not name is the default of `WireOptions`.

    Raises:
      ValueError: options that mean nothing over the wire, or values that can't be.
    """
    given = {
        parameter.name: context.params[parameter.name]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name).name == "COMMANDLINE"
    }
    if unusable := [name for name in NOT_OVER_THE_WIRE if name in given]:
        names = ", ".join("--" + name.replace("_", "-") for name in unusable)
        raise ValueError(f"{names} can't be chosen with --wire, which measures float32 on the CPU")
    fields = {}
    if rates != "auto":
        fields["rates"] = common.comma_list(rates)
    if "mesh" in given:
        fields["mesh"] = tuple(parse_mesh_shape(given["mesh"]))
    if "mkn" in given:
        fields |= _extents(given["mkn"])
    if given.get("names", "all") != "all":
        fields["names"] = common.comma_list(given["names"])
    if given.get("dataflows", "auto") != "auto":
        fields["dataflows"] = common.comma_list(given["dataflows"])
    if given.get("slices", "auto") != "auto":
        fields["slices"] = common.positive_ints(given["slices"], "--slices")
        fields["control_slices"] = max(fields["slices"])
    if "passes" in given:
        fields["passes"] = common.comma_list(given["passes"])
    fields |= {name: given[name] for name in ("repeats", "block_size") if name in given}
    return wire.WireOptions(**fields)


def _extents(mkn: list[str]) -> dict[str, int]:
    if len(mkn) != 1:
        raise ValueError("over the wire one --mkn M,K,N is measured at a time")
    extents = common.positive_ints(mkn[0], "--mkn")
    if len(extents) != 3:
        raise ValueError(f"--mkn {mkn[0]!r} is not three extents M,K,N")
    return dict(zip("mkn", extents, strict=True))


def bench_wire(context: typer.Context, rates: str, json: Path | None, plot: Path | None) -> None:
    """Measures over the wire, prints a table and writes the files."""
    with common.usage_errors():
        common.check_outputs(json, plot, draws=plot is not None)
        options = read_options(context, rates)
        if (reason := wire.lacking()) is not None:
            raise RuntimeError(f"--wire can't run here: {reason}")
        console = common.stdout()
        common.say(console, _heading(options))
        with tempfile.TemporaryDirectory() as folder:
            results = json if json is not None else Path(folder) / "records.json"
            results.unlink(missing_ok=True)
            outcome = wire.run(options, results)
            records = wire.read_records(results) if results.exists() else []
    print_table(console, COLUMNS, [_cells(record) for record in records])
    if plot is not None:
        wire.write_plot(plot, records)
    if outcome.reason is not None:
        common.say(common.stderr(), f"--wire: {outcome.reason}", style="red")
    raise typer.Exit(outcome.exit_code)


def _heading(options: wire.WireOptions) -> str:
    return (
        f"WIRE: {options.shape.num_chips} processes of one CPU device, each in a network "
        f"namespace, {common.num_threads()} CPU threads for all of them; "
        f"A[m={options.m},k={options.k}] B[k={options.k},n={options.n}] in float32 on a "
        f"{options.shape} mesh; {options.repeats} rounds, every other in reverse. All times are "
        "measured, between TCP sockets on this machine; they do not predict hardware."
    )


def _cells(record: wire.Record) -> list[str]:
    return [
        record.dataflow,
        record.pass_,
        f"{record.comm_over_compute:.2f}",
        wire.label(record),
        f"{record.ms:.0f}",
        f"{record.ratio_to_gspmd:.2f}",
        f"{record.ratio_low:.2f}-{record.ratio_high:.2f}",
        f"{record.hidden:.2f}",
    ]
