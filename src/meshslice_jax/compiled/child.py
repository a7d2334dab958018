"""The child process: reads jobs, a line of JSON each, and answers each with a line.

    python -m meshslice_jax.compiled.child < jobs > answers

It is started with `topology.environment`, so that nothing of it touches the parent's
JAX: the compiler may hang or abort the process, and some options do.
"""

import os
import sys
import time

import msgspec

from meshslice_jax.compiled.jobs import Answer, Job, lower
from meshslice_jax.compiled.topology import parse_topology, topology_mesh


def answer(job: Job) -> Answer:
    """Compiles a job."""
    start = time.perf_counter()
    try:
        mesh = topology_mesh(parse_topology(job.topology), job.mesh_shape)
        compiled = lower(job, mesh).compile(compiler_options=dict(job.options))
        return Answer(
            hlo=compiled.as_text(),
            peak_bytes=compiled.memory_analysis().peak_memory_in_bytes,
            compile_s=time.perf_counter() - start,
        )
    except Exception as error:  # whatever the compiler says is the answer
        text = f"{type(error).__name__}: {error}"
        return Answer(error=text, compile_s=time.perf_counter() - start)


def main() -> None:
    """Answers every line of standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libtpu prints must not land between answers
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        answers.write(msgspec.json.encode(answer(job)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
