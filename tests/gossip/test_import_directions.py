"""The rooms of the packages, and in which direction they import each other."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest
from repository import GOSSIP, REPOSITORY

import gossip

ROOMS_OF_TOPOLOGIES = (
    "command_lines",
    "version",
    "registry",
    "validation",
    "matrix_storage",
    "round",
    "schedule",
    "compositions",
    "graphs",
    "analysis",
    "topology",
    "families",
    "reports",
    "drawing",
    "__init__",
    "__main__",
)
ROOMS = (
    "errors",
    "private_torch",
    "measuring",
    "compression",
    "algorithms",
    "communication",
    "elastic",
    "parameters",
    "optimizers",
    "exchange",
    "sharding",
    "step",
    "wrapper",
    "virtual",
    "checkpoints",
    "launching",
    "simulation",
    "__init__",
    "integrations",
    "lab",
)
"""A room imports rooms that stand before it, and itself."""

INTERNALS_OF_LAB = {
    "gossip.checkpoints.checkpoint_folder": "whether a run can go on, and from which step",
    "gossip.checkpoints.exporting": "a bare module in the form of an export",
    "gossip.communication": "whether others have founded the run that a rank joins",
    "gossip.communication.training_store": "the same",
    "gossip.communication.host": "the module of daemon threads",
    "gossip.exchange.distributed_transport": "the size of a piece, in which the probe sends",
    "gossip.communication.shared_buffers": "which ranks share a machine",
    "gossip.exchange.edge_transport": "where messages leave and arrive, for faults",
    "gossip.exchange": "the module of notes of messages",
    "gossip.exchange.pair_averaging": "the same, where ranks do not make their steps together",
    "gossip.elastic.connections.mesh": "what serves connections, for links that are cut",
    "gossip.elastic.connections.peer_connection": "where a message is sent in part, for faults",
    "gossip.communication.waiting": "whether DDP has lost a peer",
    "gossip.compression.compiled_passes": "what quantized the buckets of a record",
    "gossip.private_torch": "what a benchmark takes of torch's private parts",
    "gossip.launching": "the fork server; under torchrun and SLURM; signals for the workers",
    "gossip.parameters.buckets": "what the probe's buckets weigh",
    "gossip.step.building.wrapper_arguments": "the wrapper's own check, before workers are started",
}
"""Where the applications take what is not public, and for what."""

FORBIDDEN = {
    "topologies": {"torch", "gossip", "hydra", "omegaconf", "sklearn", "rich", "pydantic"},
    "gossip": {"hydra", "omegaconf", "matplotlib", "sklearn", "rich", "pydantic"},
}
"""What the libraries do not load, not even inside functions; the applications in ``gossip.lab`` do."""


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What a file imports, inside functions and for type checkers too; of this package, modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def graph(package: str) -> nx.DiGraph:
    known = modules(REPOSITORY / package)
    edges = ((name, other) for name, path in known.items() for other in imports(path, known))
    return nx.DiGraph((name, other) for name, other in edges if other in known and other != name)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize(("package", "rooms"), [("topologies", ROOMS_OF_TOPOLOGIES), ("gossip", ROOMS)])
def test_rooms_are_imported_in_one_direction(package: str, rooms: tuple[str, ...]) -> None:
    upward = [
        f"{module} imports {other}"
        for module, other in graph(package).edges
        if rooms.index(room(other)) > rooms.index(room(module))
    ]
    assert upward == []


@pytest.mark.parametrize("package", ["topologies", "gossip"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    assert [circle for circle in nx.strongly_connected_components(graph(package)) if len(circle) > 1] == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_libraries_load_nothing_that_only_applications_need(package: str) -> None:
    known = modules(REPOSITORY / package)
    loaded = {
        (module, name.partition(".")[0])
        for module, path in known.items()
        if not f"{module}.".startswith("gossip.lab.")
        for name in imports(path, known)
    }
    assert [(module, name) for module, name in loaded if name in FORBIDDEN[package]] == []


def test_nothing_imports_the_integrations_but_they_themselves() -> None:
    into = {name for name, other in graph("gossip").edges if room(other) == "integrations"}
    assert {room(name) for name in into} <= {"integrations"}


def test_applications_use_public_names_and_the_internals_that_are_listed() -> None:
    used = set()
    for path in (GOSSIP / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("gossip."):
                internal = any(alias.name not in gossip.__all__ for alias in node.names)
                used |= {node.module} if internal and not f"{node.module}.".startswith("gossip.lab.") else set()
    assert used == INTERNALS_OF_LAB.keys()


def test_names_of_files_tell_them_apart() -> None:
    files = (path for package in (GOSSIP, REPOSITORY / "topologies") for path in package.rglob("*.py"))
    names = Counter(path.name for path in files if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []
