"""What benchmarks are given and count: presets, rows, refusals, links, the network and memory."""

import re
from typing import Any

import pytest
import torch
from composing import composed

from gossip.lab.benchmarks import bench_methods
from gossip.lab.benchmarks.bench_methods import expand
from gossip.lab.benchmarks.network.counters import PeakMemory, interface_bytes
from gossip.lab.benchmarks.network.shaped_hosts import bits_per_second
from gossip.lab.benchmarks.step_time import StepTimeSettings
from gossip.lab.benchmarks.workloads import WORKLOADS
from gossip.lab.experiments.validated_models import ConfigurationError, read


def settings(*overrides: str) -> StepTimeSettings:
    return read(StepTimeSettings, composed(*overrides, command="bench")["bench"], "bench")


def labels(rows: dict[str, Any]) -> list[str]:
    return [row.label for row in expand(rows, 4)]


def test_settings_main_has_every_kind() -> None:
    rows = settings().methods
    sharded = settings("bench/methods=sharded", "bench.local_size=2").methods
    large = settings("bench/methods=large").methods
    installed = set(bench_methods.METHODS) - ({"decent_dp"} if not bench_methods.decent_dp_is_installed() else set())
    assert {row.kind for row in (*rows, *sharded, *large)} == installed
    for each in (rows, sharded, large):
        assert len({row.label for row in each}) == len(each)


@pytest.mark.parametrize("preset", ["topologies", "buckets", "stragglers", "compressors"])
def test_settings_presets_can_be_built(preset: str) -> None:
    assert len(settings(f"bench/methods={preset}").methods) > 1


def test_settings_lists_are_combined_and_none_is_left_out() -> None:
    rows = expand({"ddp": {"bucket_cap_mb": [1, 25], "hook": ["none", "bf16"], "static_graph": False}}, 4)
    assert [row.label for row in rows] == ["ddp 1 MiB", "ddp 1 MiB bf16", "ddp 25 MiB", "ddp 25 MiB bf16"]
    assert rows[0].options == {"bucket_cap_mb": 1, "static_graph": False}
    assert rows[1].options == {"bucket_cap_mb": 1, "hook": "bf16", "static_graph": False}


def test_a_method_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_methods, "decent_dp_is_installed", lambda: False)
    assert labels({"decent_dp": {}, "local": {}}) == ["local"]
    with pytest.raises(ConfigurationError, match="no method of methods is installed"):
        labels({"decent_dp": {}})


def test_settings_names_and_topologies_with_options() -> None:
    named = {"method": "gossip", "topology": [{"name": "random_matching", "seed": 3}, "ring"]}
    assert labels({"mine": named}) == ["mine random_matching 3", "mine ring"]
    placed = bench_methods.gossip_arguments({"topology": {"name": "ring", "order": [0, 2, 1, 3]}}, 4)["topology"]
    assert placed.round(0).peers(0) == (2, 3)
    with pytest.raises(ValueError, match="order must name every rank from 0 to 3 once"):
        bench_methods.gossip_arguments({"topology": {"name": "ring", "order": []}}, 4)


def test_settings_of_a_case_have_one_link() -> None:
    cases = dict(settings("bench.network=lab", "bench.rate=[50mbit,1gbit]").cases())
    assert [(name, case.link) for name, case in cases.items()] == [("50mbit", "50mbit"), ("1gbit", "1gbit")]
    assert [(name, case.link) for name, case in settings().cases()] == [("loopback", None)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "bench.model=mpl",
            "there is no bench.model=mpl; did you mean mlp? Available: mlp, wide_mlp, small_mlp, large_mlp, "
            "transformer, gpt2_small, cnn",
        ),
        ("bench.rate=200", "bench.rate must be a number with kbit, mbit or gbit, such as 200mbit, got '200'"),
        ("bench.rate=[50mbit,1gbit]", "bench.network=loopback has no rate; set bench.network=lab"),
        ("bench.local_size=3", "bench.local_size=3 does not divide world_size=4; every host has as many"),
        ("bench.methods.gossip.topology=rong", "gossip: "),
        (
            "+bench.methods.gossip.bucket_cap_mb=[]",
            "bench.methods.gossip.bucket_cap_mb is an empty list; give it at least one value, or none",
        ),
        ("+bench.methods.gossip.momentum=1", "gossip has no option momentum"),
        ("bench.methods.ddp.hook=int8", "ddp: hook must be none, bf16, fp16, got 'int8'"),
        ("+bench.methods.gosip={}", "there is no method gosip; did you mean gossip?"),
        ("bench.methods.ddp=1", "bench.methods.ddp must be a mapping of options, got 1"),
    ],
)
def test_settings_refusals_are_one_line(override: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as refusal:
        settings(override)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "megabytes"), [("mlp", 16.8), ("wide_mlp", 16.8), ("small_mlp", 4.2), ("transformer", 39.8), ("cnn", 6.2)]
)
def test_models_have_their_sizes_and_the_same_start_everywhere(name: str, megabytes: float) -> None:
    workload = WORKLOADS[name]
    first, second = workload.initial_module(0), workload.initial_module(0)
    assert sum(each.nbytes for each in first.parameters()) / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    own, again, others = (workload.batches(0, rank)[0][0] for rank in (1, 1, 2))
    assert own.equal(again)
    assert not own.equal(others)
    assert not own.equal(workload.held_out(0)[0][: len(own)])


# ---------------------------------------------------------------------- links, and what is counted


def test_links_have_a_rate() -> None:
    assert [bits_per_second(text) for text in ("200mbit", "64kbit", "1.5gbit")] == [200_000_000, 64_000, 1_500_000_000]
    for text in ("200", "0mbit", "fast"):
        with pytest.raises(ValueError, match="rate must be a number with kbit, mbit or gbit, such as 200mbit, got"):
            bits_per_second(text)


def test_counters_interface_that_is_not_there() -> None:
    assert min(interface_bytes("lo")) >= 0
    with pytest.raises(ValueError, match="interface must be one of /proc/net/dev, got 'nothing0'"):
        interface_bytes("nothing0")


def test_counters_peak_memory_is_above_what_was_there() -> None:
    kept = torch.ones(5_000_000)
    memory = PeakMemory()
    del kept
    taken = torch.ones(20_000_000)
    del taken
    assert 50e6 < memory.bytes() < 95e6
