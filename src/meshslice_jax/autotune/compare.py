"""By how much the exact search beats the paper's heuristic: the table of docs/tuning.md.

    python -m meshslice_jax.autotune.compare

prints it anew. All numbers are modelled.
"""

import dataclasses
from collections.abc import Iterator

from meshslice_jax.autotune import tune
from meshslice_jax.model_plan import PASSES, ModelPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One setting under both searches.

    Attributes:
      model: its name.
      chips: all chips.
      setting: what is special, in words.
      paper_s: seconds of a block found by the paper's search, None where it finds none.
      sliced_s: the same with the heuristic's dataflows, but a slice count for each product.
      exact_s: the same by the exact search, None where nothing fits at all.
      changes: what the exact search chose otherwise, in words.
    """

    model: str
    chips: int
    setting: str
    paper_s: float | None
    sliced_s: float | None
    exact_s: float | None
    changes: str

    @property
    def gain(self) -> float | None:
        """How much longer the paper's block takes, as a fraction."""
        if self.paper_s is None or self.exact_s is None:
            return None
        return self.paper_s / self.exact_s - 1


#: (model, setting in words, arguments of `tune`) that the table goes through.
SETTINGS = (
    ("gpt3-175b", "paper's profile", {"hardware": "tpu_v4_paper"}),
    ("megatron-530b", "paper's profile", {"hardware": "tpu_v4_paper"}),
    ("gpt3-175b", "weak scaling", {}),
    ("megatron-530b", "weak scaling", {}),
    ("llama3-8b", "gated, grouped queries", {}),
    ("llama3-405b", "gated, grouped queries", {}),
    ("qwen2-7b", "gated, grouped queries", {}),
    ("gemma-2b", "gated, one kv head", {}),
    ("gpt3-175b", "skinny: 4096 tokens", {"batch": 2}),
    ("llama3-405b", "skinny: 4096 tokens", {"batch": 2}),
    ("gpt3-175b", "skinny: 128 tokens", {"batch": 1, "seq_len": 128}),
    ("gpt3-175b", "line axes (v5e)", {"hardware": "tpu_v5e"}),
    ("llama3-8b", "line axes (v5e)", {"hardware": "tpu_v5e"}),
    ("gpt3-175b", "95 % of its memory", {"memory_share": 0.95}),
    ("gpt3-175b", "75 % of its memory", {"memory_share": 0.75}),
)


def compare(model: str, chips: int, setting: str = "", **arguments) -> Comparison:
    """Both searches of one setting.

    Args:
      model: as for `tune`.
      chips: as for `tune`.
      setting: what is special, in words.
      **arguments: of `tune`; memory_share is a limit as a fraction of what the exact
        search takes without one.
    """
    share = arguments.pop("memory_share", None)
    if share is not None:
        free = tune(model, chips, **arguments).predicted.memory_bytes
        arguments["memory_limit_bytes"] = int(free * share)
    exact = _tuned(model, chips, arguments)
    paper = _tuned(model, chips, arguments | {"search": "paper"})
    sliced = paper and _tuned(model, chips, arguments | _dataflows(paper))
    return Comparison(
        model=model,
        chips=chips,
        setting=setting,
        paper_s=paper and paper.predicted.block_s,
        sliced_s=sliced and sliced.predicted.block_s,
        exact_s=exact and exact.predicted.block_s,
        changes=_changes(paper, exact),
    )


def _dataflows(plan: ModelPlan) -> dict:
    """Pins for the dataflows of a plan and its algorithm; slice counts and mesh are free."""
    overrides = {name: {"dataflow": one.forward.dataflow} for name, one in plan.layers.items()}
    return {"overrides": overrides, "algorithm": "meshslice"}


def _tuned(model: str, chips: int, arguments: dict) -> ModelPlan | None:
    try:
        return tune(model, chips, **arguments)
    except ValueError:  # nothing fits: a result here, in a row of its own
        return None


def _changes(paper: ModelPlan | None, exact: ModelPlan | None) -> str:
    if exact is None:
        return "nothing fits"
    if paper is None:
        return "the heuristic fits nowhere"
    found = []
    if paper.mesh_shape != exact.mesh_shape:
        found.append(f"{exact.mesh_shape} for {paper.mesh_shape}")
    flows = [
        f"{name} {exact.layers[name].forward.dataflow.value}"
        for name in exact.layers
        if exact.layers[name].forward.dataflow != paper.layers[name].forward.dataflow
    ]
    found += [", ".join(flows)] if flows else []
    used = sorted(
        {getattr(one, part).algorithm for one in exact.layers.values() for part in PASSES}
        - {"meshslice"}
    )
    found += [" + ".join(used)] if used else []
    return "; ".join(found) or "slice counts"


def table(chip_counts: tuple[int, ...] = (16, 64, 256)) -> Iterator[str]:
    """The comparison as lines of a Markdown table."""
    yield (
        "| model | setting | chips | paper's search, ms | slices per product, ms | exact, ms "
        "| gain | what it changes |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for model, setting, arguments in SETTINGS:
        for chips in chip_counts:
            one = compare(model, chips, setting, **arguments)
            paper, sliced, exact = (
                "-" if seconds is None else f"{seconds * 1e3:.3f}"
                for seconds in (one.paper_s, one.sliced_s, one.exact_s)
            )
            gain = "-" if one.gain is None else f"{one.gain:.1%}"
            yield (
                f"| {model} | {setting} | {chips} | {paper} | {sliced} | "
                f"{exact} | {gain} | {one.changes} |"
            )


if __name__ == "__main__":
    print("\n".join(table()))
