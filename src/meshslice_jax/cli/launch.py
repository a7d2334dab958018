"""`meshslice launch`: a command as several processes on this machine."""

from typing import Annotated

import typer

from meshslice_jax import launch as launcher
from meshslice_jax.cli import common


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="The program and its arguments.")
    ],
    num_processes: Annotated[
        int, typer.Option("-n", "--num-processes", help="Processes to start.", min=1)
    ],
    devices_per_process: Annotated[
        int, typer.Option(help="CPU devices that each process emulates.", min=1)
    ] = 1,
    port: Annotated[
        int | None, typer.Option(help="Port of process 0; by default one that is free.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="End everything after so many seconds.")
    ] = None,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds from the first process that joins to the last.")
    ] = 60.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life of a process that has joined.")
    ] = 30.0,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds without a step of any process, after the first step.")
    ] = 600.0,
    leave_timeout: Annotated[
        float,
        typer.Option(help="Seconds from the first process that is done to the last."),
    ] = 120.0,
    grace: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = 5.0,
) -> None:
    """Run a command as several processes that JAX joins into one program.

    The program calls meshslice_jax.distributed.initialize() first, as bench and train do;
    it sees n x devices-per-process CPU devices. Output is shown with the number of its
    process. When one fails, or hangs for longer than the time-outs, all are ended and the
    exit code is that of the one that failed (124 for a time-out).
    """
    with common.usage_errors():
        outcome = launcher.launch(
            command,
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            port=port,
            limits=launcher.Limits(
                timeout_s=timeout,
                join_s=join_timeout,
                heartbeat_s=heartbeat_timeout,
                step_s=step_timeout,
                leave_s=leave_timeout,
                grace_s=grace,
            ),
        )
    if outcome.reason is not None:
        text = f"meshslice launch: {outcome.reason}; all processes were ended"
        common.say(common.stderr(), text, style="red")
    raise typer.Exit(outcome.exit_code)
