"""What a chip and its links can do: rates, latencies and their sources.

A `HardwareSpec` is the only thing that turns a schedule's bytes, hops and FLOPs into
seconds, so every number of it says where it comes from and whether it was fitted
(`Fact`). All values are SI: seconds, bytes, FLOP/s. Machines that are not shipped
are JSON files with the same field names (`load_spec`).

Each axis of the mesh is a ring or a LINE. On a ring a collective uses the links to
both neighbours at once. A line has no wrap-around link: a gather must carry all that
lies on one side of a cut over the one link there, so a throughput-bound collective
takes about twice as long, and what a shift sends round the ring must travel back past
every other chip. (JAX scaling book, chapter 3; MeshSlice, ISCA 2025, section 4.)
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Literal

import msgspec

WrapAround = Literal["always", "axes_of_16", "multiples_of_4", "never"]
_WRAPS = {
    "always": lambda length: True,
    "axes_of_16": lambda length: length == 16,
    "multiples_of_4": lambda length: length % 4 == 0,
    "never": lambda length: False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
    """Where the number in one field of a spec comes from.

    Attributes:
      field: the field of HardwareSpec.
      source: page, paper section, or how it was measured.
      fitted: True if the number was chosen so that the model meets other numbers.
    """

    field: str
    source: str
    fitted: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """One chip of a 2D mesh and its links.

    Attributes:
      name: what outputs call this profile.
      peak_flops_per_s: operand dtype name -> multiply-add FLOP/s of one chip (a
        mapping; stored as sorted pairs, so that specs compare and hash).
      mxu_efficiency: fraction of the peak that a large product reaches.
      mxu_tile: multiples to which the local m, n, k of a product are rounded up.
      product_launch_s: time to start one local product.
      hbm_bytes: memory of one chip.
      hbm_bytes_per_s: memory bandwidth of one chip.
      links_per_axis: links of one chip along one mesh axis, both neighbours together.
      link_bytes_per_s: one-way rate of one link.
      link_efficiency: fraction of that rate that a transfer reaches while a product
        runs.
      idle_link_efficiency: the same while none runs.
      gather_launch_s: time to start an all-gather.
      scatter_launch_s: time to start a reduce-scatter.
      permute_launch_s: time to start a neighbour send, or a chain of them.
      gather_hop_s: synchronisation per ring step of an all-gather.
      scatter_hop_s: synchronisation per ring step of a reduce-scatter.
      permute_hop_s: synchronisation per step of a neighbour send.
      accumulates_in_hbm: whether a product that adds to earlier ones reads and writes its
        float32 result in HBM; many thin slices are bound by that.
      hbm_bytes_per_link_byte: HBM traffic of the links: one read where a byte leaves
        and one write where it arrives make 2.
      contention: share of the links' HBM time that stalls a product of the same step.
      wrap_around: which axis lengths are rings: "always", "axes_of_16",
        "multiples_of_4" or "never".
      synchronous: kinds of transfers beside which the chip computes nothing ("all_gather",
        "reduce_scatter", "all_to_all", "permute"): what its compiler does not overlap.
      facts: the source of each number.

    Raises:
      ValueError: a number that no machine can have, naming field and value.
    """

    name: str
    peak_flops_per_s: Mapping[str, float] | tuple[tuple[str, float], ...]
    mxu_efficiency: float
    mxu_tile: tuple[int, int, int]
    product_launch_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    links_per_axis: int
    link_bytes_per_s: float
    link_efficiency: float
    idle_link_efficiency: float
    gather_launch_s: float
    scatter_launch_s: float
    permute_launch_s: float
    gather_hop_s: float
    scatter_hop_s: float
    permute_hop_s: float
    accumulates_in_hbm: bool
    hbm_bytes_per_link_byte: float
    contention: float
    wrap_around: WrapAround
    synchronous: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()

    def __post_init__(self):
        peaks = tuple(sorted(dict(self.peak_flops_per_s).items()))
        object.__setattr__(self, "peak_flops_per_s", peaks)
        if faults := _faults(self):
            raise ValueError(f"HardwareSpec {self.name!r}: " + "; ".join(faults))

    def __hash__(self) -> int:
        return hash(self.name)  # cheap: tuners key caches by spec; equal specs share a name

    def flops_per_s(self, dtype: str) -> float:
        """Peak FLOP/s with operands of `dtype`.

        Raises:
          ValueError: the spec has no rate for that dtype.
        """
        for name, rate in self.peak_flops_per_s:
            if name == dtype:
                return rate
        known = ", ".join(name for name, _ in self.peak_flops_per_s)
        raise ValueError(
            f"hardware {self.name!r} has no FLOP/s for operands of {dtype}; it has {known}. "
            "Use one of these dtypes or add the rate to a JSON copy of the profile"
        )

    def is_ring(self, length: int) -> bool:
        """Whether an axis of `length` chips has a wrap-around link."""
        return _WRAPS[self.wrap_around](length)

    def axis_bytes_per_s(self, length: int, *, overlapped: bool, directions: int = 2) -> float:
        """Rate at which one chip sends along an axis of `length` chips.

        Args:
          length: chips along the axis.
          overlapped: whether a product runs at the same time.
          directions: 2 if the transfer uses both ring directions, 1 if only one.
        """
        fraction = self.link_efficiency if overlapped else self.idle_link_efficiency
        rate = self.link_bytes_per_s * self.links_per_axis * fraction
        return rate if directions == 2 and self.is_ring(length) else rate / 2

    def describe(self) -> list[tuple[str, str, str, bool]]:
        """Rows (field, value, source, fitted) of every number, for printing."""
        facts = {fact.field: fact for fact in self.facts}
        unsourced = Fact(field="", source="not given")
        rows = []
        for field in dataclasses.fields(self):
            if field.name not in ("name", "facts"):
                fact = facts.get(field.name, unsourced)
                rows.append(
                    (field.name, _shown(getattr(self, field.name)), fact.source, fact.fitted)
                )
        return rows


def _shown(value) -> str:
    if value == ():
        return "none"
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return ", ".join(f"{dtype} {rate:g}" for dtype, rate in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


_RULES = (
    (
        (
            "product_launch_s",
            "gather_launch_s",
            "scatter_launch_s",
            "permute_launch_s",
            "gather_hop_s",
            "scatter_hop_s",
            "permute_hop_s",
            "hbm_bytes_per_link_byte",
            "contention",
        ),
        lambda value: 0 <= value < math.inf,
        "at least 0 and finite",
    ),
    (
        ("hbm_bytes", "hbm_bytes_per_s", "links_per_axis", "link_bytes_per_s"),
        lambda value: 0 < value < math.inf,
        "above 0 and finite",
    ),
    (
        ("mxu_efficiency", "link_efficiency", "idle_link_efficiency"),
        lambda value: 0 < value <= 1,
        "in (0, 1]",
    ),
)


#: Kinds of transfers that a compiler may or may not run beside products.
_KINDS = ("all_gather", "reduce_scatter", "all_to_all", "permute")


def _faults(spec: HardwareSpec) -> list[str]:
    """Every field whose value no machine can have."""
    found = []
    for fields, holds, rule in _RULES:
        values = [(field, getattr(spec, field)) for field in fields]
        found += [f"{f} must be {rule}, got {value}" for f, value in values if not holds(value)]
    for dtype, rate in spec.peak_flops_per_s:
        if not rate > 0:
            found.append(f"peak_flops_per_s[{dtype!r}] must be above 0, got {rate}")
    if not spec.peak_flops_per_s:
        found.append("peak_flops_per_s names no dtype")
    if len(spec.mxu_tile) != 3 or min(spec.mxu_tile) < 1:
        found.append(f"mxu_tile must be three positive multiples, got {spec.mxu_tile}")
    if spec.wrap_around not in _WRAPS:
        found.append(f"wrap_around={spec.wrap_around!r} is not one of {', '.join(_WRAPS)}")
    if strange := set(spec.synchronous) - set(_KINDS):
        found.append(
            f"synchronous names {', '.join(sorted(strange))}; kinds are {', '.join(_KINDS)}"
        )
    unknown = {fact.field for fact in spec.facts} - {f.name for f in dataclasses.fields(spec)}
    if unknown:
        found.append(f"facts about unknown fields {', '.join(sorted(unknown))}")
    return found


def spec_from_json(data: bytes | str, where: str = "JSON") -> HardwareSpec:
    """Reads a spec; every field but `facts` and `synchronous` must be there, and no other may be.

    Args:
      data: a JSON object with the fields of HardwareSpec.
      where: what messages call the source.

    Raises:
      ValueError: not JSON, unknown or missing fields, or a wrong type, named.
    """
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where} is not a JSON object: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(raw).__name__}")
    fields = {field.name for field in dataclasses.fields(HardwareSpec)}
    faults = []
    if unknown := sorted(raw.keys() - fields):
        faults.append(f"unknown fields {', '.join(unknown)}")
    if missing := sorted(fields - {"facts", "synchronous"} - raw.keys()):
        faults.append(f"missing fields {', '.join(missing)}")
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)} (fields of HardwareSpec)")
    try:
        return msgspec.convert(raw, HardwareSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


def load_spec(path: str | pathlib.Path) -> HardwareSpec:
    """Reads a spec from a JSON file; see `spec_from_json`."""
    return spec_from_json(pathlib.Path(path).read_bytes(), str(path))


def spec_to_json(spec: HardwareSpec) -> str:
    """The JSON text that `spec_from_json` reads back as an equal spec."""
    fields = dataclasses.asdict(spec) | {"peak_flops_per_s": dict(spec.peak_flops_per_s)}
    return json.dumps(fields, indent=2) + "\n"
