"""Cleans up after a process that is gone, however it went.

    python watchdog.py < orders

The owner writes orders, a line of JSON each, and holds the pipe open. When the pipe closes,
because the owner ended or was killed, what stands is done, the last order first:

    ["kill", PROCESS_GROUP]         SIGKILL to a process group
    ["run", PROGRAM, ARGUMENT, ..]  a command, such as one that removes a network namespace
    ["drop", ORDER]                 takes an order back: it was done

The watchdog runs in a session of its own, so that what ends the owner's does not end it.
It uses the standard library alone: it starts in milliseconds and imports nothing of ours.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys


def main() -> None:
    """Reads orders until the pipe closes, then does those that stand."""
    standing = []
    for line in sys.stdin:
        order = json.loads(line)
        if order[0] == "drop":
            standing.remove(order[1])
        else:
            standing.append(order)
    for kind, *arguments in standing[::-1]:
        if kind == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(arguments[0], signal.SIGKILL)
        else:
            subprocess.run(arguments, stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
