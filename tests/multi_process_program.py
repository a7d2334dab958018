"""What each process of tests/test_multi_process.py runs: cases of the table, bit for bit.

    python multi_process_program.py COUNT

COUNT cases of each algorithm, the whole table for 0. Operands are made in place, and each
process compares the shards that it has. Every other case is on a mesh whose columns, not
its rows, are in different processes.
"""

import random
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding

import cases
import meshslice_jax as ms
from meshslice_jax import distributed
from reference import derivatives, small_integers


def chosen(count):
    """Cases on the meshes that all devices fill, the same on every process."""
    fit = [case for case in cases.table() if np.prod(case.mesh) == jax.device_count()]
    if count == 0:
        return fit
    choose = random.Random(2026)
    return [
        case
        for name in ms.ALGORITHMS
        if (ours := [case for case in fit if case.plan.algorithm == name])
        for case in choose.sample(ours, count)
    ]


def mesh_of(shape, transposed):
    devices = np.asarray(jax.devices())
    grid = devices.reshape(shape[::-1]).T if transposed else devices.reshape(shape)
    return ms.make_mesh(shape, devices=grid.ravel())


def gradients(plan, mesh):
    def loss(lhs, rhs):
        out = ms.matmul(lhs, rhs, plan, mesh=mesh)
        return (out**2).sum(), out

    def function(lhs, rhs):
        (_, out), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(lhs, rhs)
        return (out, *found)

    return jax.jit(function)


def check(case, transposed):
    density = min(0.5, 12 / max(case.m, case.n, case.k))
    host = [
        small_integers(1, case.m, case.k, density=density),
        small_integers(2, case.k, case.n, density=density),
    ]
    expected, bound = derivatives(*host)
    assert bound < 2**24
    mesh = mesh_of(case.mesh, transposed)
    operands = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)
        for x, spec in zip(host, ms.placements(case.plan), strict=False)
    ]
    for got, want in zip(gradients(case.plan, mesh)(*operands), expected, strict=False):
        assert not got.is_fully_addressable
        for shard in got.addressable_shards:
            assert (np.asarray(shard.data) == want[shard.index]).all(), (case, transposed)


def main():
    world = distributed.initialize()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    found = chosen(int(sys.argv[1]))
    for number, case in enumerate(found):
        distributed.step()
        check(case, transposed=bool(number % 2))
        jax.clear_caches()
    print(f"process {world.process_id}: {len(found)} cases, {len(jax.local_devices())} devices")


if __name__ == "__main__":
    main()
