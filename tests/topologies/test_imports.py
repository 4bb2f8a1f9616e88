"""What `import topologies` loads, in a fresh interpreter."""

import subprocess
import sys

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
