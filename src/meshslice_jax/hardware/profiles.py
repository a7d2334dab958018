"""The machines that ship with the package.

Two families. The *nominal* profiles take the vendor's rates as they are, a few
latencies from the JAX scaling book, and rings only where the machine has them; they
are for planning. The *paper* profiles describe the simulated TPUv4 cluster of
MeshSlice (ISCA 2025, section 4); `tpu_v4_paper` has two constants fitted to the four
utilisations of the paper's Table 2 and is what published numbers are compared with.
`docs/time_model.md` says what each constant does to each reproduced number.
"""

import dataclasses

from meshslice_jax.hardware.spec import Fact, HardwareSpec, WrapAround

_GIB = 2**30
_SCALING_BOOK = "JAX scaling book, chapter 3"
_PAPER = "MeshSlice (ISCA 2025), section 4"
_PROTOTYPE = "the authors' public code, hwnam831/meshslice"


def _nominal(
    name: str,
    page: str,
    *,
    peak_flops_per_s: dict[str, float],
    mxu_tile: tuple[int, int, int] = (8, 128, 128),
    hbm_gib: int,
    hbm_bytes_per_s: float,
    link_bytes_per_s: float,
    wrap_around: WrapAround,
) -> HardwareSpec:
    """A profile of vendor rates; `page` is the vendor's page of the chip."""
    hop = f"about 1 us per hop: {_SCALING_BOOK}"
    launch = f"a tiny all-gather on a 4-ring of v5e took 8 us, 3 hops of 1 us: {_SCALING_BOOK}"
    no_loss = "nominal: no loss assumed"
    sources = {
        "peak_flops_per_s": f"{page}; float32 at JAX's default precision is one bfloat16 pass",
        "mxu_efficiency": no_loss,
        "mxu_tile": "a register is 8 x 128; systolic array of the chip",
        "product_launch_s": "assumed: one program, no host in between",
        "hbm_bytes": page,
        "hbm_bytes_per_s": page,
        "links_per_axis": "one link to each neighbour",
        "link_bytes_per_s": f"{page} (aggregate over its links)",
        "link_efficiency": no_loss,
        "idle_link_efficiency": no_loss,
        "gather_launch_s": launch,
        "scatter_launch_s": launch,
        "permute_launch_s": launch,
        "gather_hop_s": hop,
        "scatter_hop_s": hop,
        "permute_hop_s": hop,
        "accumulates_in_hbm": "a result of a large product does not fit on the chip",
        "hbm_bytes_per_link_byte": "structure: one read and one write",
        "contention": "assumed: a product that is bound by its MXU leaves HBM to the links",
        "wrap_around": f"{_SCALING_BOOK}; vendor pages",
        "synchronous": "nominal: everything overlaps",
    }
    return HardwareSpec(
        name=name,
        peak_flops_per_s=peak_flops_per_s,
        mxu_efficiency=1.0,
        mxu_tile=mxu_tile,
        product_launch_s=0.0,
        hbm_bytes=hbm_gib * _GIB,
        hbm_bytes_per_s=hbm_bytes_per_s,
        links_per_axis=2,
        link_bytes_per_s=link_bytes_per_s,
        link_efficiency=1.0,
        idle_link_efficiency=1.0,
        gather_launch_s=5e-6,
        scatter_launch_s=5e-6,
        permute_launch_s=5e-6,
        gather_hop_s=1e-6,
        scatter_hop_s=1e-6,
        permute_hop_s=1e-6,
        accumulates_in_hbm=True,
        hbm_bytes_per_link_byte=2.0,
        contention=0.0,
        wrap_around=wrap_around,
        facts=tuple(Fact(field=field, source=source) for field, source in sources.items()),
    )


TPU_V4 = _nominal(
    "tpu_v4",
    "Cloud TPU v4 page; Jouppi et al., ISCA 2023",
    peak_flops_per_s={"bfloat16": 275e12, "float32": 275e12, "int8": 275e12},
    hbm_gib=32,
    hbm_bytes_per_s=1.2e12,
    link_bytes_per_s=50e9,
    wrap_around="multiples_of_4",
)
TPU_V5E = _nominal(
    "tpu_v5e",
    "Cloud TPU v5e page",
    peak_flops_per_s={"bfloat16": 197e12, "float32": 197e12, "int8": 393e12},
    hbm_gib=16,
    hbm_bytes_per_s=819e9,
    link_bytes_per_s=50e9,
    wrap_around="axes_of_16",
)
TPU_V5P = _nominal(
    "tpu_v5p",
    "Cloud TPU v5p page",
    peak_flops_per_s={"bfloat16": 459e12, "float32": 459e12, "int8": 918e12},
    hbm_gib=95,
    hbm_bytes_per_s=2.765e12,
    link_bytes_per_s=100e9,
    wrap_around="multiples_of_4",
)
TPU_V6E = _nominal(
    "tpu_v6e",
    "Cloud TPU v6e page",
    peak_flops_per_s={"bfloat16": 918e12, "float32": 918e12, "int8": 1836e12},
    mxu_tile=(8, 256, 256),
    hbm_gib=32,
    hbm_bytes_per_s=1.638e12,
    link_bytes_per_s=100e9,
    wrap_around="axes_of_16",
)
TPU_7X = _nominal(
    "tpu_7x",
    "Cloud TPU7x page",
    peak_flops_per_s={
        "bfloat16": 2307e12,
        "float32": 2307e12,
        "float8_e4m3fn": 4614e12,
        "float8_e5m2": 4614e12,
    },
    mxu_tile=(8, 256, 256),
    hbm_gib=192,
    hbm_bytes_per_s=7.38e12,
    link_bytes_per_s=100e9,
    wrap_around="multiples_of_4",
)

_LAUNCH = "launch times 13 us all-gather and send, 26 us reduce-scatter: " + _PROTOTYPE
_FITTED = "fitted to the four utilisations of Table 2"
_HOP_FITTED = f"{_FITTED}, with link_efficiency; one value for all kinds"
TPU_V4_PAPER = HardwareSpec(
    name="tpu_v4_paper",
    peak_flops_per_s={"bfloat16": 272e12, "float32": 272e12, "int8": 272e12},
    mxu_efficiency=1.0,
    mxu_tile=(8, 128, 128),
    product_launch_s=5e-6,
    hbm_bytes=32 * _GIB,
    hbm_bytes_per_s=1.2e12,
    links_per_axis=2,
    link_bytes_per_s=50e9,
    link_efficiency=0.84,
    idle_link_efficiency=0.84,
    gather_launch_s=13e-6,
    scatter_launch_s=26e-6,
    permute_launch_s=13e-6,
    gather_hop_s=13.8e-6,
    scatter_hop_s=13.8e-6,
    permute_hop_s=13.8e-6,
    accumulates_in_hbm=False,
    hbm_bytes_per_link_byte=2.0,
    contention=1.0,
    wrap_around="always",
    facts=(
        Fact(field="peak_flops_per_s", source=f"2 cores of 136 TFLOP/s, bfloat16: {_PAPER}"),
        Fact(field="mxu_efficiency", source="structural choice; the prototype has 0.978"),
        Fact(field="mxu_tile", source=f"a register is 8 x 128: {_PAPER}"),
        Fact(field="product_launch_s", source="assumed; 0 to 20 us moves utilisations by <= 1.2"),
        Fact(field="hbm_bytes", source=_PAPER),
        Fact(field="hbm_bytes_per_s", source=_PAPER),
        Fact(field="links_per_axis", source=f"2D torus, four links a chip: {_PAPER}"),
        Fact(field="link_bytes_per_s", source=_PAPER),
        Fact(field="link_efficiency", source=_FITTED, fitted=True),
        Fact(field="idle_link_efficiency", source="equal to link_efficiency"),
        Fact(field="gather_launch_s", source=_LAUNCH),
        Fact(field="scatter_launch_s", source=_LAUNCH),
        Fact(field="permute_launch_s", source=_LAUNCH),
        Fact(field="gather_hop_s", source=_HOP_FITTED, fitted=True),
        Fact(field="scatter_hop_s", source=_HOP_FITTED, fitted=True),
        Fact(field="permute_hop_s", source=_HOP_FITTED, fitted=True),
        Fact(field="accumulates_in_hbm", source="left out when the constants were fitted"),
        Fact(field="hbm_bytes_per_link_byte", source="structure: one read and one write"),
        Fact(field="contention", source="structural choice: links and cores share HBM in turn"),
        Fact(field="wrap_around", source=f"2D torus: {_PAPER}"),
        Fact(field="synchronous", source=f"everything overlaps: {_PAPER}"),
    ),
)


def _variant(name: str, facts: dict[str, tuple[str, bool]], **changes) -> HardwareSpec:
    """The paper profile with some numbers changed, and their sources with them."""
    kept = tuple(fact for fact in TPU_V4_PAPER.facts if fact.field not in facts)
    new = tuple(Fact(field=f, source=text, fitted=fitted) for f, (text, fitted) in facts.items())
    return dataclasses.replace(TPU_V4_PAPER, name=name, facts=kept + new, **changes)


_JUNE = f"June 2024 version of {_PROTOTYPE}"
#: One fitted constant, all others the prototype's of June 2024.
TPU_V4_PAPER_1C = _variant(
    "tpu_v4_paper_1c",
    {
        "mxu_efficiency": (f"266 of 272 TFLOP/s: {_PROTOTYPE}", False),
        "link_efficiency": (_FITTED, True),
        "idle_link_efficiency": ("equal to link_efficiency", False),
        "gather_hop_s": (_JUNE, False),
        "scatter_hop_s": (_JUNE, False),
        "permute_hop_s": (f"as the all-gather: {_JUNE}", False),
    },
    mxu_efficiency=0.978,
    link_efficiency=0.808,
    idle_link_efficiency=0.808,
    gather_hop_s=13e-6,
    scatter_hop_s=7e-6,
    permute_hop_s=13e-6,
)
#: Nominal link rate while nothing else runs; two constants fitted.
TPU_V4_PAPER_3 = _variant(
    "tpu_v4_paper_3",
    {
        "link_efficiency": (_FITTED, True),
        "idle_link_efficiency": ("nominal rate while no product runs", False),
        "gather_hop_s": (_HOP_FITTED, True),
        "scatter_hop_s": (_HOP_FITTED, True),
        "permute_hop_s": (_HOP_FITTED, True),
    },
    link_efficiency=0.828,
    idle_link_efficiency=1.0,
    gather_hop_s=15.6e-6,
    scatter_hop_s=15.6e-6,
    permute_hop_s=15.6e-6,
)
#: The prototype's constants of today; kept to show that they do not give the paper's numbers.
TPU_V4_PROTOTYPE = _variant(
    "tpu_v4_prototype",
    {
        "mxu_efficiency": (f"266 of 272 TFLOP/s: {_PROTOTYPE}", False),
        "link_efficiency": ("taken over from tpu_v4_paper, where it is fitted", False),
        "gather_hop_s": (_PROTOTYPE, False),
        "scatter_hop_s": (_PROTOTYPE, False),
        "permute_hop_s": (f"as the all-gather; {_PROTOTYPE} has 50 us for a send", False),
    },
    mxu_efficiency=0.978,
    gather_hop_s=5e-6,
    scatter_hop_s=5e-6,
    permute_hop_s=5e-6,
)
_LOW = f"short latencies after {_SCALING_BOOK}; not comparable with the paper"
#: Short latencies, for planning.
TPU_V4_LOWLAT = _variant(
    "tpu_v4_lowlat",
    {
        "mxu_efficiency": ("assumed: large products reach 95 %", False),
        "link_efficiency": ("560 of 680 us, a measured 34 MB all-gather: " + _SCALING_BOOK, False),
        **{
            f"{kind}_{what}_s": (_LOW, False)
            for kind in ("gather", "scatter", "permute")
            for what in ("launch", "hop")
        },
    },
    mxu_efficiency=0.95,
    link_efficiency=0.82,
    idle_link_efficiency=0.82,
    gather_launch_s=5e-6,
    scatter_launch_s=5e-6,
    permute_launch_s=5e-6,
    gather_hop_s=2.7e-6,
    scatter_hop_s=2.7e-6,
    permute_hop_s=2.7e-6,
)


def _compiled(base: HardwareSpec, synchronous: tuple[str, ...], found: str) -> HardwareSpec:
    """A nominal profile with what the compiler of today overlaps."""
    facts = tuple(fact for fact in base.facts if fact.field != "synchronous")
    source = f"{found}; read from schedules of libtpu 0.0.52 (docs/compiled_schedules.md)"
    return dataclasses.replace(
        base,
        name=f"{base.name}_compiled",
        synchronous=synchronous,
        facts=(*facts, Fact(field="synchronous", source=source)),
    )


#: What the compilers of the generations overlap, with the options that help.
TPU_V4_COMPILED = _compiled(
    TPU_V4, ("reduce_scatter",), "gathers, permutes and all-to-alls run beside products"
)
TPU_V5E_COMPILED = _compiled(
    TPU_V5E, ("reduce_scatter",), "gathers and permutes run beside products"
)
TPU_V5P_COMPILED = _compiled(
    TPU_V5P, ("all_gather", "reduce_scatter"), "permutes and all-to-alls run beside products"
)
TPU_V6E_COMPILED = _compiled(
    TPU_V6E, ("all_gather", "reduce_scatter"), "permutes and all-to-alls run beside products"
)
