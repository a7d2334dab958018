"""In which order a chip starts its tasks, and in which a simulation may time them.

A compiler fixes one program for all chips. It is found here on one undisturbed chip:
whatever can start starts, in program order (list scheduling, with the links' traffic
slowing products). Each resource (the MXU, each link) then keeps its order on every
chip, whatever happens to it.
"""

import collections
from collections.abc import Iterator

from meshslice_jax.schedule import Product, Transfer
from meshslice_jax.task_graph import Task
from meshslice_jax.timeline import RESOURCES

#: A product keeps at least this share of its rate, however fast the links are. (No
#: profile comes near it; it keeps a JSON spec with absurd links from stopping time.)
LEAST_RATE = 0.05


def resources(work: Product | Transfer, synchronous: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The MXU, or the links that a transfer occupies; one-way transfers use "-".

    Args:
      work: a product or transfer.
      synchronous: kinds of transfers that occupy the MXU too: it waits for them.
    """
    if isinstance(work, Product):
        return ("mxu",)
    links = (f"{work.axis}+", f"{work.axis}-")
    links = links if work.directions == 2 else links[1:]
    return ("mxu", *links) if work.kind in synchronous else links


def issue_order(
    tasks: tuple[Task, ...],
    prices: list[float],
    loads: list[float],
    synchronous: tuple[str, ...] = (),
) -> list[int]:
    """The order in which one undisturbed chip starts its tasks.

    Whenever a resource is free, the first task in program order that has all it waits
    for starts on it.

    Args:
      tasks: in program order; `after` points backwards.
      prices: nominal seconds of each.
      loads: for each transfer, the share of its rate that it takes from a product.
      synchronous: see `resources`.
    """
    waiting = [len(set(task.after)) for task in tasks]
    followers = collections.defaultdict(list)
    for index, task in enumerate(tasks):
        for before in set(task.after):
            followers[before].append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    left = list(prices)
    running: dict[str, int] = {}
    order: list[int] = []
    while ready or running:
        for index in sorted(ready):
            needed = resources(tasks[index].work, synchronous)
            if not any(resource in running for resource in needed):
                running |= dict.fromkeys(needed, index)
                ready.remove(index)
                order.append(index)
        active = set(running.values())
        rate = max(1 - sum(loads[index] for index in active), LEAST_RATE)
        rates = {i: rate if isinstance(tasks[i].work, Product) else 1.0 for i in active}
        elapsed = min(left[i] / rates[i] for i in active)
        # All that ends within rounding of the first end, ends with it.
        over = [i for i in active if left[i] / rates[i] <= elapsed * (1 + 1e-9)]
        for i in active:
            left[i] -= elapsed * rates[i]
        running = {r: i for r, i in running.items() if i not in over}
        for follower in (f for i in over for f in followers[i]):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return order


def processing_order(
    tasks: tuple[Task, ...], issued: list[int], synchronous: tuple[str, ...] = ()
) -> Iterator[int]:
    """Issue order, with every transfer as early and every product as late as may be.

    Args:
      tasks: in program order.
      issued: from `issue_order`; each resource keeps its order.
      synchronous: see `resources`.
    """
    queues = {resource: collections.deque() for resource in RESOURCES}
    for index in issued:
        for resource in resources(tasks[index].work, synchronous):
            queues[resource].append(index)
    done = [False] * len(tasks)

    def first_in_line(resource: str) -> int | None:
        if not queues[resource]:
            return None
        head = queues[resource][0]
        in_line = all(queues[r][0] == head for r in resources(tasks[head].work, synchronous))
        return head if in_line and all(done[before] for before in tasks[head].after) else None

    left = len(tasks)
    while left:
        # The MXU is asked only when no link can go on.
        heads = (first_in_line(resource) for resource in (*RESOURCES[1:], RESOURCES[0]))
        chosen = next(head for head in heads if head is not None)
        for resource in resources(tasks[chosen].work, synchronous):
            queues[resource].popleft()
        done[chosen] = True
        left -= 1
        yield chosen
