"""Nothing that comes from another rank or from a file is unpickled: unpickling runs whatever code it is told to."""

import ast
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

from ranks import on_ranks
from repository import REPOSITORY

from gossip.communication.world import World

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "rpc",
    "scatter_object_list",
    "send_object_list",
}
BETWEEN_A_PARENT_AND_ITS_CHILDREN = {
    "gossip/launching/launcher.py": {"pickle"},
    "gossip/launching/worker_reports.py": {"pickle"},
}
"""By pipes that nobody else can open."""


def unpickled(tree: ast.AST) -> Iterator[str]:
    """What in a file pickles or unpickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLING_MODULES)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PICKLING_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute | ast.Name | ast.alias):
            name = (
                node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else node.name
            )
            if name in PICKLING_COLLECTIVES:
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("weights_only") != "True" and given.get("allow_pickle") != "False":
                yield ast.unparse(node)


def test_no_file_pickles_between_ranks() -> None:
    found = {
        path.relative_to(REPOSITORY).as_posix(): set(unpickled(ast.parse(path.read_text())))
        for folder in ("gossip", "topologies", "scripts")
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == BETWEEN_A_PARENT_AND_ITS_CHILDREN


@on_ranks(3)
def test_plain_data_arrives_as_it_was_sent() -> None:
    sent = [{"times": [0.1, 1e-300, 2**53], "name": "wörter", "none": None}, [[], {}, "x" * 10_000], 3]
    with closing(World(timedelta(seconds=60))) as world:
        assert world.gather_json(sent[world.rank], "gathering") == sent
