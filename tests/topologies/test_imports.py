"""What `import topologies` loads, in a fresh interpreter."""

import os
import subprocess
import sys

CODE = """
import sys
before = set(sys.modules)
import topologies
for name in topologies.available():
    topologies.family(name)
topologies.build("ring", 4).round(0).matrix()
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_import_loads_only_networkx_and_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"topologies", "networkx", "numpy"} <= loaded
    foreign = loaded - set(sys.stdlib_module_names) - {"topologies", "networkx", "numpy"}
    # Private helpers (of Cython, of site packages) are no imports of ours.
    assert not {name for name in foreign if not name.startswith("_")}


def test_import_changes_nothing() -> None:
    code = """
import os, logging, threading, warnings
before = (dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:], threading.active_count())
import topologies
assert before == (dict(os.environ), list(warnings.filters), logging.getLogger().handlers[:], threading.active_count())
"""
    subprocess.run([sys.executable, "-c", "import networkx, numpy\n" + code], check=True, env=dict(os.environ))
