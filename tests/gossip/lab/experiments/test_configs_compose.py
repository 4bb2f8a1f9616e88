"""Every option of every group composes, can be built, and has a comment that --help shows."""

import re
from pathlib import Path

import pytest
from composing import composed
from hydra import compose, initialize_config_dir
from repository import CONFIGS, REPOSITORY

import topologies
from gossip.lab.experiments.experiment_build import check, make_topology
from gossip.lab.experiments.option_help import help_text
from gossip.lab.loggers.logger_choice import make_loggers
from gossip.lab.sweeps import sweeper
from gossip.lab.sweeps.sweep_jobs import read_variants
from gossip.lab.sweeps.sweeper import read_tuning

TEXT = ("data=stdlib_text", "data.max_bytes=60000", "data.context_length=16")


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_configs_topology_has_one_file_per_family() -> None:
    assert options("topology") == sorted(topologies.available())


@pytest.mark.parametrize("name", options("topology"))
def test_configs_topology_builds_its_family(name: str, tmp_path: Path) -> None:
    world_size = next(n for n in range(4, 78) if topologies.variants(name, n))
    overrides = [f"topology={name}", f"launch.world_size={world_size}"]
    if name == "graph":
        graph = tmp_path / "square.edgelist"
        graph.write_text("0 1\n1 2\n2 3\n3 0\n")
        overrides.append(f"topology.options.graph={graph}")
    config = composed(*overrides, "seed=7")
    assert (config["topology"].get("options") or {}).get("seed", 7) == 7
    topology = make_topology(config)
    assert topology is not None
    assert (topology.name, topology.world_size) == (name, world_size)


OWN_MOMENTUM = ("optimizer.momentum=0", "optimizer.nesterov=false")
NEEDED = {
    **dict.fromkeys(("diloco", "sparse_loco", "streaming_diloco"), ("topology=complete",)),
    "relay_sum": ("topology=path",),
    **dict.fromkeys(("decentlam", "quasi_global_integral", "quasi_global_momentum"), OWN_MOMENTUM),
    **dict.fromkeys(("adam_tracking", "desloc"), ("optimizer=adamw",)),
    **dict.fromkeys(("char_transformer", "stdlib_text"), (*TEXT, "model=char_transformer")),
    "text_files": (*TEXT[1:], "model=char_transformer", f"data.folder={REPOSITORY / 'docs'}", "data.pattern=*.md"),
    "char_lm": TEXT[1:],
    "gpt2_small": (*TEXT[1:], "model.width=12", "model.depth=1"),
}
"""What an option of a group needs of others."""


@pytest.mark.parametrize(
    "group", ["algorithm", "compression", "optimizer", "scheduler", "logger", "launch", "model", "data", "experiment"]
)
def test_configs_group_options_build(group: str) -> None:
    for option in options(group):
        overrides = ["topology=ring", f"{group}={option}", *NEEDED.get(option, ())]  # every compression serves rings
        assert check(config := composed(*overrides)).shards.steps_per_epoch >= 1
        assert make_loggers(config).keys() == ({option} - {"jsonl"} if group == "logger" else set())


def test_configs_topology_local_steps_and_warm_up() -> None:
    complete, ring = topologies.build("complete", 4), topologies.build("ring", 4)
    for overrides, wanted in (
        ((), ring),
        (("topology.every=4",), ring.every(4)),
        (("topology.warmup_rounds=100",), complete.then(ring, after=100)),
        (("topology.every=2", "topology.order=[0,2,1,3]"), ring.every(2).permuted([0, 2, 1, 3])),
        (("topology.every=4", "topology.warmup_rounds=100"), complete.then(ring.every(4), after=100)),
    ):
        assert make_topology(composed("topology=ring", *overrides)) == wanted


SWEEPS = [path.stem for path in sorted(CONFIGS.glob("experiment/*.yaml")) if "For gossip sweep" in path.read_text()]


@pytest.mark.parametrize("name", SWEEPS)
def test_configs_sweeps_leave_no_topology_out(name: str) -> None:
    sweeper.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("sweep", [f"experiment={name}"], return_hydra_config=True)
    params = config.hydra.sweeper.params
    sizes = [int(size) for size in str(params.get("launch.world_size", 16)).split(",")]
    for topology in params.topology.split(","):
        for size in sizes:
            assert topologies.build(topology, size).world_size == size
    assert params.seed == "range(21)" or len(params.seed.split(",")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["algorithms", "batch_norm", "heterogeneity", "language", "scaling"])
def test_configs_of_paired_sweeps_build_every_variant(name: str) -> None:
    config = composed(f"experiment={name}")
    tuning = read_tuning(config, {"seed": ["seed=0", "seed=1"]})
    assert tuning is not None
    assert tuning.values == tuple(sorted(tuning.values))
    small = ["launch.world_size=2", *(["data.max_bytes=60000"] if name == "language" else [])]
    for variant in read_variants(config, {}):
        assert check(composed(f"experiment={name}", *small, *variant)).topology is not None


FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "experiment"]
ANSWERED_BY_THE_FILE = ("_target_", "name", "options", "defaults", "hydra", "partition")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_option_has_a_comment_and_help_shows_it(path: Path) -> None:
    is_bench = "bench" in path.relative_to(CONFIGS).as_posix()
    text = help_text("script.py", CONFIGS, path.stem if path.parent == CONFIGS else "bench" if is_bench else "train")
    for line in path.read_text().split("\nhydra:")[0].splitlines():
        if match := re.fullmatch(r"\s*([\w/]+):(?: ([^#\n]*?))?\s*(?:  # (.*))?", line):
            key, value, comment = match.groups()
            if key not in ANSWERED_BY_THE_FILE and (path.parent != CONFIGS or value or comment):
                assert comment, f"{key} has no comment"
                assert f"\n  {line}\n" in f"{text}\n"


def test_help_shows_what_the_command_can_choose() -> None:
    text = help_text("scripts/train.py", CONFIGS, "train")
    for name in ("topology=de_bruijn", "experiment=smoke"):
        assert f"\n{name}\n" in text
    assert "bench." not in text
