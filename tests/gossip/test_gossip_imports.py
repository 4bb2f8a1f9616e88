"""What importing the packages does: load little, and do nothing; and one file touches what torch calls private."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from repository import GOSSIP, REPOSITORY
from torch import nn

from gossip import ExchangeError, GossipDataParallel, StepStats

FORBIDDEN = {"hydra", "omegaconf", "matplotlib", "sklearn", "safetensors", "rich"}
FORBIDDEN |= {"mlflow", "tensorboard", "wandb"}
TRAINERS = {"accelerate", "lightning", "transformers"}
FORBIDDEN |= TRAINERS

SCRIPT = """
import json, os, sys, threading
before = dict(os.environ)
import gossip
import torch.distributed as dist
from loguru import logger
print(json.dumps({
    "compiler": "torch._dynamo" in sys.modules,
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "threads": threading.active_count(),
    "environment": before == dict(os.environ),
    "initialised": dist.is_initialized(),
    "handlers": len(logger._core.handlers),
    "missing": [name for name in gossip.__all__ if not hasattr(gossip, name)],
}))
"""


def test_import_in_a_fresh_interpreter() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(run.stdout)
    assert not FORBIDDEN & set(seen["modules"])
    assert not seen["compiler"]  # a second, of which most programs need nothing
    assert seen["threads"] == 1
    assert seen["environment"]
    assert not seen["initialised"]
    assert seen["handlers"] == 1
    assert seen["missing"] == []
    assert run.stderr == ""


def imported(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The packages that are loaded when a module is: not inside functions, and not for type checkers alone."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield str(statement.module).partition(".")[0]
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from imported(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt))


@pytest.mark.parametrize("path", sorted(GOSSIP.rglob("*.py")), ids=lambda path: str(path.relative_to(GOSSIP)))
def test_no_module_loads_what_only_its_functions_need(path: Path) -> None:
    is_integration = path.is_relative_to(GOSSIP / "integrations")
    forbidden = FORBIDDEN - TRAINERS if is_integration else FORBIDDEN
    assert not forbidden & set(imported(ast.parse(path.read_text()).body))


def test_nothing_is_drawn_by_pyplot() -> None:
    """It has a state of the whole process, and opens windows."""
    files = [path for package in (GOSSIP, REPOSITORY / "topologies") for path in package.rglob("*.py")]
    assert not [path for path in files if re.search(r"^\s*(import|from)\b.*pyplot", path.read_text(), re.MULTILINE)]


PRIVATE = re.compile(
    r"\btorch\.(\w+\.)*_(?!_)\w|\bdist\._(?!_)|from torch(\.\w+)*\._|distributed_c10d|_execution_engine"
    r"|\b_optimizer_step_p|_opt_called|_wrapped_by_lr|_active_ddp|_is_fsdp|_coalescing\(|(?<!self)\._(parameters|buffers|modules)\b"
    r"|_non_persistent_buffers|_compiled_call_impl|_step_supports_amp"
)
OTHERS = sorted(path for path in GOSSIP.rglob("*.py") if path.name != "private_torch.py")
WORDS = re.compile(r"#.*|\"[^\"]*\"|_coalescing\((group|\w+, device)")
"""Comments and texts may name it."""


def test_only_one_file_touches_what_is_private() -> None:
    lines = [(path, line) for path in OTHERS for line in path.read_text().splitlines()]
    assert not [(path, line) for path, line in lines if PRIVATE.search(WORDS.sub("", line))]


def test_renamed_attributes_are_found_by_their_old_names_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"culprits=\.\.\.\) is deprecated; use failed_ranks"):
        error = ExchangeError("rank 0: rank 1 is gone", culprits=[1])
    with pytest.warns(DeprecationWarning, match="use failed_ranks"):
        assert error.culprits == error.failed_ranks == (1,)
    with pytest.warns(DeprecationWarning, match="use generation"):
        assert StepStats(step=0, exposed_wait_s=0.0, bytes_sent=0, generation=3).epoch == 3


@on_ranks(2, anew=True)
def test_training_loads_nothing_of_what_continues_without_lost_ranks_by_default() -> None:
    with GossipDataParallel(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1), "ring") as model:
        model(torch.ones(1, 2)).sum().backward()
    assert not [name for name in sys.modules if "gossip.elastic" in name or name.endswith("generation_change")]


# ---------------------------------------------------------------------- topologies


CODE = """
import networkx, numpy  # what these change is no matter of ours
import logging, os, sys, threading, warnings
modules = set(sys.modules)
before = dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:], threading.active_count()
import topologies
topologies.build("ring", 4).round(0).matrix()
assert before == (dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:], threading.active_count())
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - modules}))
"""


def test_import_loads_only_networkx_and_numpy_and_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    foreign = set(done.stdout.split()) - set(sys.stdlib_module_names) - {"topologies", "networkx", "numpy"}
    # Private helpers (of Cython, of site packages) are no imports of ours.
    assert not {name for name in foreign if not name.startswith("_")}
