"""What would help where nothing runs or fits: changes of one argument, each of them tried.

A kind of change is a row of candidates, the least change first; the first with which some
mesh runs within its limit is named. Nothing is guessed: what is named was searched, and the
smallest limit is what the leanest plan of every layer needs. Pins come first: where running
without one is enough, nothing else is tried.
"""

from collections.abc import Iterator

from meshslice_jax.mesh import divisors

#: Numbers of chips that are tried on either side of one on which nothing runs.
_NEIGHBOURS = 64
#: How often chips are doubled, and tokens halved.
_HALVINGS = 8

#: Words for a change, and the arguments of `tune` that make it.
Change = tuple[str, dict[str, object]]


def ways_out(tuning, jobs: list) -> list[str]:
    """Changes of one argument with which something runs, in words; empty if none was found.

    Args:
      tuning: the `search.Tuning` for which nothing was found.
      jobs: its meshes on which the block would run under a larger limit.
    """
    limit = [_smallest_limit(tuning, jobs)] if jobs else []
    found = _helping(tuning, _fewer_pins(tuning))
    if not found:  # otherwise the pins are to blame
        found = _helping(tuning, _less_to_hold(tuning) if jobs else _better_divisors(tuning))
    return [words for words in (*limit, *found) if words is not None]


def _helping(tuning, kinds: Iterator[Iterator[Change]]) -> list[str]:
    return [words for kind in kinds if (words := _first(tuning, kind)) is not None]


def _first(tuning, kind: Iterator[Change]) -> str | None:
    """The words of the first change with which something runs."""
    for words, arguments in kind:
        try:
            changed = tuning.changed(**arguments)
        except ValueError:  # it cannot be together with the other arguments
            continue
        if changed.fits():
            return words
    return None


def _smallest_limit(tuning, jobs: list) -> str | None:
    """The smallest limit on any mesh; meshes whose shards alone need more are not priced."""
    least, job = float("inf"), None
    for tried in sorted(jobs, key=lambda one: one.limit.resident_bytes):
        if tried.limit.resident_bytes >= least:
            break
        if (found := tuning.least_limit(tried, least)) is not None:
            least, job = found, tried
    if job is None:
        return None
    copies = f" x {job.replicas} replicas" if job.replicas > 1 else ""
    return f"a memory limit of {least:,} bytes, the smallest that works (on {job.shape}{copies})"


def _less_to_hold(tuning) -> Iterator[Iterator[Change]]:
    """Fewer tokens, more chips for the same tokens, no replicas."""
    steps = [2**power for power in range(1, _HALVINGS + 1)]
    batch, chips = tuning.batch, tuning.num_chips
    for name, value in (("batch", batch), ("seq_len", tuning.seq_len)):
        fewer = [value // step for step in steps if value % step == 0]
        yield iter([(f"{name} {one}", {"batch": batch, name: one}) for one in fewer])
    yield (
        (f"{chips * step} chips with batch {batch}", {"num_chips": chips * step, "batch": batch})
        for step in steps
    )
    if tuning.given["data_parallel"] != 1:
        yield iter([("data_parallel 1", {"data_parallel": 1})])


def _better_divisors(tuning) -> Iterator[Iterator[Change]]:
    """Other numbers of chips, smaller meshes of several replicas, a batch that divides."""
    chips, batch = tuning.num_chips, tuning.batch
    power = 2 ** (chips.bit_length() - 1)
    below = [*range(chips - 1, max(chips - _NEIGHBOURS, 1) - 1, -1), power]
    above = [*range(chips + 1, chips + _NEIGHBOURS), 2 * power]
    for near in (below, above):
        yield ((f"{one} chips", {"num_chips": one}) for one in near if one > 1)
    if tuning.given["data_parallel"] == 1:
        yield (
            (
                f"data_parallel {degree} with batch {(whole := -(-batch // degree) * degree)}",
                {"data_parallel": degree, "batch": whole},
            )
            for degree in divisors(chips)[1:]
        )
    whole = -(-batch // chips) * chips
    yield iter([(f"batch {whole}", {"batch": whole})])


def _fewer_pins(tuning) -> Iterator[Iterator[Change]]:
    for name in ("algorithm", "mesh_shape", "overrides"):
        if tuning.given[name]:
            yield iter([(f"without {name}", {name: None})])
    if tuning.search != "exact":
        yield iter([("search exact", {"search": "exact"})])
