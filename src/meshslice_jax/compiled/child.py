"""The child process: reads jobs, a line of JSON each, and answers each with a line.

    python -m meshslice_jax.compiled.child [CACHE] < jobs > answers

Answers are kept in the folder CACHE, by what they depend on: the lowered program, the
topology and mesh, the options, and the versions of JAX and the compiler.

It is started with `topology.environment`, so that nothing of it touches the parent's
JAX: the compiler may hang or abort the process, and some options do.
"""

import gzip
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from meshslice_jax.compiled.jobs import Answer, Job, lower
from meshslice_jax.compiled.topology import parse_topology, topology_mesh


def answer(job: Job, cache: Path | None = None) -> Answer:
    """Compiles a job, or finds its answer in the cache."""
    start = time.perf_counter()
    try:
        mesh = topology_mesh(parse_topology(job.topology), job.mesh_shape)
        lowered = lower(job, mesh)
        kept = cache and cache / f"{key(job, lowered.as_text())}.json.gz"
        if kept and kept.exists():
            return msgspec.json.decode(gzip.decompress(kept.read_bytes()), type=Answer)
        compiled = lowered.compile(compiler_options=dict(job.options))
        found = Answer(
            hlo=compiled.as_text(),
            peak_bytes=compiled.memory_analysis().peak_memory_in_bytes,
            compile_s=time.perf_counter() - start,
        )
        if kept:
            keep(found, kept)
        return found
    except Exception as error:  # whatever the compiler says is the answer
        text = f"{type(error).__name__}: {error}"
        return Answer(error=text, compile_s=time.perf_counter() - start)


def key(job: Job, program: str) -> str:
    """Names all that a compiled schedule depends on."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    parts = [job.topology, job.mesh_shape, sorted(job.options.items()), versions, program]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def keep(found: Answer, path: Path) -> None:
    """Writes an answer, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(gzip.compress(msgspec.json.encode(found), 1))
    os.replace(file.name, path)


def main() -> None:
    """Answers every line of standard input."""
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libtpu prints must not land between answers
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        answers.write(msgspec.json.encode(answer(job, cache)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
