"""The dense product and its derivatives in exact integer arithmetic, written by hand.

For out = L R and loss = sum(out ** 2), with D = 2 out:
    gL = D R^T,  gR = L^T D
and for second = sum(gL ** 2) + sum(gR ** 2), with hats for derivatives by gL, gR, D:
    gL^ = 2 gL,  gR^ = 2 gR,  D^ = gL^ R + L gR^
    hL = D gR^^T + 2 D^ R^T,   hR = gL^^T D + 2 L^T D^
"""

import jax
import numpy as np

import meshslice_jax as ms


def everything(plan, mesh):
    """(lhs, rhs) -> out, both gradients of sum(out ** 2), both second gradients.

    A weight that is stored in parts has gradients in parts.
    """

    def loss(lhs, rhs):
        out = ms.matmul(lhs, rhs, plan, mesh=mesh)
        return (out**2).sum(), out

    def second(lhs, rhs):
        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(lhs, rhs)
        squares = [(x**2).sum() for x in jax.tree.leaves(grads)]
        return sum(squares[1:], squares[0]), (out, *grads)

    def function(lhs, rhs):
        (_, first), found = jax.value_and_grad(second, (0, 1), has_aux=True)(lhs, rhs)
        return (*first, *found)

    return jax.jit(function)


def derivatives(lhs: np.ndarray, rhs: np.ndarray) -> tuple[list[np.ndarray], int]:
    """[out, gL, gR, hL, hR], and a bound on every partial sum on the way.

    The bound is the largest entry of |X| |Y| over all products X Y, so it holds for any
    order of summation; below 2**24 float32 is exact.
    """
    lhs, rhs = lhs.astype(np.int64), rhs.astype(np.int64)
    bounds = []

    def product(x, y):
        bounds.append(int((np.abs(x) @ np.abs(y)).max(initial=0)))
        return x @ y

    out = product(lhs, rhs)
    d = 2 * out
    grad_lhs, grad_rhs = product(d, rhs.T), product(lhs.T, d)
    hat_lhs, hat_rhs = 2 * grad_lhs, 2 * grad_rhs
    hat_d = 2 * (product(hat_lhs, rhs) + product(lhs, hat_rhs))
    second_lhs = product(d, hat_rhs.T) + product(hat_d, rhs.T)
    second_rhs = product(hat_lhs.T, d) + product(lhs.T, hat_d)
    results = [out, grad_lhs, grad_rhs, second_lhs, second_rhs]
    return results, max(bounds + [int(np.abs(x).max(initial=0)) for x in (*results, hat_d)])


def small_integers(seed: int, *shape: int, density: float = 0.3) -> np.ndarray:
    """Integers in {-1, 0, 1} as float32, `density` of them not zero."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1.0, 1.0], shape)
    return np.where(random.random(shape) < density, signs, 0.0).astype(np.float32)
