"""Which runs a sweep is made of."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from composing import composed

from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.lab.sweeps.sweep_jobs import Run, expand, make_plan, read_variants, why_not_served


def axes(**values: str) -> dict[str, list[str]]:
    """``topology="ring,star"`` as the overrides of an axis; ``__`` stands for a dot."""
    keys = {key: key.replace("__", ".") for key in values}
    return {keys[key]: [f"{keys[key]}={value}" for value in text.split(",")] for key, text in values.items()}


def overrides_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    return [run.overrides for run in runs]


def compose(overrides: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    chosen = dict(override.split("=", 1) for override in overrides)
    return composed(*overrides), {
        "algorithm": chosen.get("algorithm", "adapt_while_communicating"),
        "compression": chosen.get("compression", "none"),
    }


def test_grid_baselines_drop_what_means_nothing_to_them() -> None:
    runs = expand(axes(topology="base", topology__options__k="2", algorithm="adapt_then_combine", optimizer__lr="0.1"))
    assert overrides_of(runs) == [
        ("topology=base", "topology.options.k=2", "algorithm=adapt_then_combine", "optimizer.lr=0.1"),
        ("optimizer.lr=0.1", "method=ddp"),
        ("optimizer.lr=0.1", "method=local"),
    ]


def test_grid_of_baselines_alone_has_both_once() -> None:
    assert overrides_of(expand(axes(method="local,ddp", topology="ring,star"))) == [("method=ddp",), ("method=local",)]
    assert overrides_of(expand(axes(topology="ring,star"), "ddp")) == [("method=ddp",), ("method=local",)]


def test_grid_variants_are_run_by_gossip_alone() -> None:
    variants = [("algorithm=adapt_then_combine",), ("algorithm=decentlam", "optimizer.momentum=0")]
    runs = expand(axes(topology="ring", seed="0,1"), variants=variants)
    assert overrides_of(runs) == [
        *(("topology=ring", f"seed={seed}", *variant) for seed in (0, 1) for variant in variants),
        *((f"seed={seed}", f"method={method}") for seed in (0, 1) for method in ("ddp", "local")),
    ]
    assert {run.reference for run in runs} == {("seed=0", "method=ddp"), ("seed=1", "method=ddp")}


def test_plan_leaves_out_what_is_not_served_and_says_why() -> None:
    plan = make_plan(
        axes(topology="hypercube,ring,one_peer_exponential", compression="none,choco", launch__world_size="6"), compose
    )
    assert [line.partition(": ")[0] for line in plan.left_out] == [
        "hypercube on 6 ranks is left out",
        "one_peer_exponential on 6 ranks is left out",
    ]
    assert "power of two" in plan.left_out[0]
    assert [(job.setting.label, job.setting.compression) for job in plan.jobs] == [
        ("ring", "none"),
        ("ring", "choco"),
        ("one_peer_exponential", "none"),
        ("all-reduce", None),
        ("no communication", None),
    ]
    assert why_not_served(composed("method=ddp", "topology=hypercube", "launch.world_size=3")) is None


def test_plan_tells_variants_apart() -> None:
    variants = [
        ("algorithm=integral_correction", "algorithm.form=awc"),
        ("algorithm=integral_correction", "algorithm.form=atc"),
        ("algorithm=quasi_global_momentum", "optimizer.momentum=0", "optimizer.nesterov=false"),
    ]
    plan = make_plan(axes(topology="ring", seed="0,1"), compose, variants)
    rows = list(dict.fromkeys((job.setting.label, job.setting.algorithm) for job in plan.jobs))
    assert rows == [
        ("ring", "integral_correction"),
        ("ring", "integral_correction(form=atc)"),
        ("ring, optimizer.momentum=0, optimizer.nesterov=false", "quasi_global_momentum"),
        ("all-reduce", None),
        ("no communication", None),
    ]
    assert len(plan.jobs) == 2 * len(rows)


def test_plan_variants_are_read_as_a_shell_would() -> None:
    config = {"sweep": {"variants": ["algorithm=extra wrapper.clip='bucket'", "topology=star"]}}
    assert read_variants(config, axes(seed="0")) == [("algorithm=extra", "wrapper.clip=bucket"), ("topology=star",)]
    assert read_variants({"sweep": {"variants": []}}, {}) == [()]


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("algorithm=extra", r"sweep\.variants must be a valid array, got 'algorithm=extra'"),
        (["algorithm=extra", 3], r"sweep\.variants\[1\] must be a valid string, got 3"),
        (["algorithm"], r"sweep\.variants=algorithm: algorithm has no value"),
        (["algorithm=extra seed=3"], r"sweep\.variants=algorithm=extra seed=3: seed is an option of the sweep too"),
        (["launch.world_size=9"], r"launch\.world_size would be another one than all-reduce's; .* topology, algorithm"),
    ],
)
def test_plan_refuses_variants_that_cannot_be_compared(variants: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_variants({"sweep": {"variants": variants}}, axes(seed="0,1"))


def test_plan_refuses_two_runs_that_are_the_same() -> None:
    with pytest.raises(ConfigurationError, match=r"two runs of the sweep are the same: .*lr=0\.1 .*lr=0\.10"):
        make_plan(axes(optimizer__lr="0.1,0.10"), compose)
