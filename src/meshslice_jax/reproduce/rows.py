"""Every published number beside ours, from one calibration.

Each row says what was fitted, what the model predicted with those constants, and what
is only reported (settings that the calibration does not describe). A claim over Wang
carries the form of Wang's algorithm and the meshes that it was given in its id:
`fc_gain_over_wang@activations_ringed_merged@32x8`.
(MeshSlice, ISCA 2025, Table 2 and 3, Figs. 9 to 14, sections 5 and 6.)
"""

import dataclasses
import functools

from meshslice_jax.dataflow import Dataflow
from meshslice_jax.hardware import HardwareSpec, hardware_spec
from meshslice_jax.mesh import MeshShape
from meshslice_jax.models import fc_layers
from meshslice_jax.models import model as find_model
from meshslice_jax.problem import GemmProblem
from meshslice_jax.reproduce import search
from meshslice_jax.reproduce.peers import DEFAULT_WANG, WangForm
from meshslice_jax.reproduce.published import BOTH, GPT3, MEGATRON, PUBLISHED, lookup
from meshslice_jax.reproduce.rest import non_fc_s
from meshslice_jax.reproduce.row import Row
from meshslice_jax.reproduce.search import Timed

MODELS = (GPT3, MEGATRON)
SEQ_LEN = 2048
STRONG_BATCH = 32
TUNED_SHAPE = MeshShape(32, 8)
SWEPT_SHAPES = (MeshShape(8, 32), MeshShape(16, 16), MeshShape(32, 8), MeshShape(64, 4))
SWEPT_SLICES = (1, 2, 4, 8, 16, 32)
ALGORITHMS = search.ALGORITHMS_2D + search.ALGORITHMS_1D


def reproduce(
    which: str | HardwareSpec = "tpu_v4_paper", wang: WangForm = DEFAULT_WANG
) -> list[Row]:
    """All rows, on one machine.

    Args:
      which: the hardware profile; `tpu_v4_paper` is the calibration.
      wang: the form in which Wang's algorithm is modelled.

    Raises:
      ValueError: unknown hardware.
    """
    spec = hardware_spec(which)
    rows = []
    for model in MODELS:
        rows += _headline(spec, model, wang)
        rows += _scaling(spec, model, wang)
        rows += _sweeps(spec, model)
        rows += _breakdown(spec, model, wang)
        rows += _real_4x4(spec, model, wang)
    return rows + _sixteen_products(spec, wang)


def _row(
    row_id: str, model: str, ours, unit: str, kind: str = "predicted", chips: int = 256
) -> Row:
    published = lookup(PUBLISHED, row_id, model)
    return Row(
        id=row_id, model=model, chips=chips, published=published, ours=ours, unit=unit, kind=kind
    )


@functools.lru_cache(maxsize=512)
def timed_block(
    spec: HardwareSpec,
    model: str,
    chips: int,
    algorithm: str,
    wang: WangForm = DEFAULT_WANG,
    batch: int | None = None,
    dataflow: Dataflow | None = None,
    shape: MeshShape | None = None,
    slice_count: int | None = None,
) -> Timed:
    """One block's FC layers; batch chips / 2 (weak scaling) unless given."""
    tokens = SEQ_LEN * (batch or chips // 2)
    return search.block(
        tuple(fc_layers(find_model(model), tokens).values()),
        chips,
        algorithm,
        spec,
        dataflow=dataflow,
        shapes=shape and (shape,),
        slice_count=slice_count,
        wang=wang,
    )


def _gain(slow_s: float, fast_s: float) -> float:
    """By how many percent the fast one is faster."""
    return 100 * (slow_s / fast_s - 1)


def _headline(spec: HardwareSpec, model: str, wang: WangForm) -> list[Row]:
    """Utilisations, claims over Wang and the loss from 16 to 256 chips."""
    ours = timed_block(spec, model, 256, "meshslice")
    all_y = timed_block(spec, model, 256, "meshslice", dataflow=Dataflow.OS)
    small = timed_block(spec, model, 16, "meshslice")
    kind = "fitted" if any(fact.fitted for fact in spec.facts) else "predicted"
    rest_s = non_fc_s(find_model(model), 128, SEQ_LEN, 256, spec)
    rows = [
        _row("fc_utilisation/tuned", model, ours.utilisation(spec), "percent", kind),
        _row("fc_utilisation/all_y_stationary", model, all_y.utilisation(spec), "percent", kind),
    ]
    for where, shape in (("own_shape", None), (str(TUNED_SHAPE), TUNED_SHAPE)):
        peer = timed_block(spec, model, 256, "wang", wang, shape=shape)
        gain = _gain(peer.total_s, ours.total_s)
        whole = _gain(peer.total_s + rest_s, ours.total_s + rest_s)
        rows.append(_row(f"fc_gain_over_wang@{wang}@{where}", model, gain, "percent"))
        rows.append(_row(f"end_to_end_gain_over_wang@{wang}@{where}", model, whole, "percent"))
    published_s = ours.total_s * ours.utilisation(spec) / PUBLISHED["fc_utilisation/tuned", model]
    slower_s = published_s * (1 + PUBLISHED["fc_gain_over_wang", model] / 100)
    whole = _gain(slower_s + rest_s, published_s + rest_s)
    loss = 100 * (1 - ours.utilisation(spec) / small.utilisation(spec))
    rows.append(_row("end_to_end_gain_over_wang@published_fc_gain", model, whole, "percent"))
    rows.append(_row("non_fc_ms_per_block", model, 1e3 * rest_s, "ms"))
    rows.append(_row("efficiency_lost_16_to_256", model, loss, "percent"))
    return rows


def _scaling(spec: HardwareSpec, model: str, wang: WangForm) -> list[Row]:
    """Weak and strong scaling of all algorithms, and their order at 256 chips."""
    rows, strong_kind = [], "predicted" if model == GPT3 else "reported"
    for chips in (16, 64, 256):
        for name in ALGORITHMS:
            used = timed_block(spec, model, chips, name, wang).utilisation(spec)
            rows.append(_row(f"weak_scaling/{name}", model, used, "percent", chips=chips))
    weak = {row.id.rpartition("/")[2]: row.ours for row in rows[-len(ALGORITHMS) :]}
    rest = max(weak[name] for name in ALGORITHMS[3:])
    ordered = weak["meshslice"] > weak["wang"] > weak["collective"] > rest
    rows.append(_row("order_meshslice_wang_collective_rest", model, int(ordered), "true"))
    strong = {}
    for chips in (16, 64, 256):
        for name in ALGORITHMS:
            timed = timed_block(spec, model, chips, name, wang, batch=STRONG_BATCH)
            strong[name] = timed.utilisation(spec)
            row_id = f"strong_scaling/{name}"
            rows.append(_row(row_id, model, strong[name], "percent", strong_kind, chips))
    gap = strong["meshslice"] - strong["collective"]
    row_id = "strong_scaling_gap_meshslice_over_collective"
    return [*rows, _row(row_id, model, gap, "points", strong_kind)]


def _sweeps(spec: HardwareSpec, model: str) -> list[Row]:
    """Mesh shapes at their own slice counts, and slice counts at the tuned shape."""
    rows, times = [], {}
    for shape in SWEPT_SHAPES:
        timed = timed_block(spec, model, 256, "meshslice", shape=shape)
        times[shape] = timed.total_s
        rows.append(_row(f"mesh_shape/{shape}", model, timed.utilisation(spec), "percent"))
    spread = max(times.values()) / min(times.values())
    rows.append(_row("mesh_shape_best_over_worst", model, spread, "ratio"))
    best = timed_block(spec, model, 256, "meshslice").mesh_shape
    rows.append(_row("mesh_shape_best_rows", model, best.rows, "rows"))
    for count in SWEPT_SLICES:
        timed = timed_block(spec, model, 256, "meshslice", shape=TUNED_SHAPE, slice_count=count)
        used = timed.utilisation(spec)
        rows.append(_row(f"slice_count_at_32x8/{count}", model, used, "percent"))
    return rows


def _breakdown(spec: HardwareSpec, model: str, wang: WangForm) -> list[Row]:
    """Where the time of a block goes at 256 chips (Fig. 10's bars have no numbers)."""
    rows = []
    for name in ALGORITHMS:
        timed = timed_block(spec, model, 256, name, wang)
        fields = ("math_s", "comm_row_s", "comm_col_s", "exposed_s")
        parts = {field.removesuffix("_s"): timed.sum(field) for field in fields}
        rows += [
            _row(f"breakdown/{name}/{part}", model, 1e3 * part_s, "ms", "reported")
            for part, part_s in parts.items()
        ]
        ratio = (parts["comm_row"] + parts["comm_col"]) / parts["math"]
        rows.append(_row(f"comm_over_math/{name}", model, ratio, "ratio", "reported"))
    return rows


def _real_4x4(spec: HardwareSpec, model: str, wang: WangForm) -> list[Row]:
    """The paper's real 4x4 slice, where XLA ran everything in turn (Table 3).

    A shift and a collective used one link direction there. Batch 16, S = 4; the authors'
    estimate with overlap has S = 8. Two settings: the simulator's constants, and two
    constants (MXU efficiency, link rate) of its own, which those eight numbers fix.
    """
    settings = {"simulator_constants": (0.978, 0.42), "own_two_constants": (0.70, 0.62)}
    rows = []
    for setting, (mxu_efficiency, link_efficiency) in settings.items():
        machine = dataclasses.replace(
            spec,
            name=f"{spec.name}/real_4x4/{setting}",
            mxu_efficiency=mxu_efficiency,
            link_efficiency=link_efficiency,
            idle_link_efficiency=link_efficiency,
            gather_hop_s=5e-6,
            scatter_hop_s=5e-6,
            permute_hop_s=5e-6,
            contention=0.0,
        )
        block = functools.partial(timed_block, machine, model, 16, batch=16, shape=MeshShape(4, 4))
        for name in ("collective", "wang", "meshslice"):
            timed = block(name, wang, slice_count=4)
            serial_s = timed.sum("upper_bound_s")
            used = timed.utilisation(machine) * timed.total_s / serial_s
            row_id = f"real_4x4/{name}@{setting}"
            rows.append(_row(row_id, model, used, "percent", "reported", 16))
        used = block("meshslice", slice_count=8).utilisation(machine)
        row_id = f"real_4x4/overlapped@{setting}"
        rows.append(_row(row_id, model, used, "percent", "reported", 16))
    return rows


def sixteen_products() -> tuple[GemmProblem, ...]:
    """The products of Fig. 11, (m, n, k): 262144 tokens, H = 12k and 20k."""
    tokens, found = 256 * 1024, []
    for hidden in (12 * 1024, 20 * 1024):
        wide = [hidden, 3 * hidden, 4 * hidden]
        shapes = [(hidden, width, tokens) for width in wide]
        shapes += [(tokens, hidden, width) for width in wide]
        shapes += [(tokens, width, hidden) for width in wide[1:]]
        found += [GemmProblem.uniform(m, n, k, "bfloat16") for m, n, k in shapes]
    return tuple(found)


def _sixteen_products(spec: HardwareSpec, wang: WangForm) -> list[Row]:
    """Fig. 11, each product on its own fastest mesh."""
    rows, used, wang_at_ours = [], {name: [] for name in search.ALGORITHMS_2D}, []
    for problem in sixteen_products():
        for name in search.ALGORITHMS_2D:
            timed = search.single(problem, 256, name, spec, wang)
            used[name].append(timed.utilisation(spec))
            row_id = f"product/{problem.m}x{problem.n}x{problem.k}/{name}"
            rows.append(_row(row_id, BOTH, used[name][-1], "percent"))
            if name == "meshslice":
                peer = search.single(problem, 256, "wang", spec, wang, (timed.mesh_shape,))
                wang_at_ours.append(peer.utilisation(spec))
    ours = used["meshslice"]

    def mean_gain(theirs: list[float]) -> float:
        return sum(_gain(a, b) for a, b in zip(ours, theirs, strict=True)) / len(ours)

    fastest = sum(each[0] == max(each) for each in zip(*used.values(), strict=True))
    over_wang = f"mean_gain_over_wang_16_products@{wang}"
    return [
        _row(
            "mean_gain_over_collective_16_products", BOTH, mean_gain(used["collective"]), "percent"
        ),
        _row(f"{over_wang}@own_shape", BOTH, mean_gain(used["wang"]), "percent"),
        _row(f"{over_wang}@meshslice_shape", BOTH, mean_gain(wang_at_ours), "percent"),
        _row("meshslice_fastest_of_16_products", BOTH, fastest, "count"),
        _row("communication_model_error_on_hardware", BOTH, None, "percent", "reported", 4),
        *rows,
    ]
