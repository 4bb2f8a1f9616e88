"""Whether the packages ``gossip`` and ``topologies`` that Python finds are those of the distribution gossip-training.

Another distribution may install a package of the same name into the same folder, or into one that comes first on the
path. Nobody else has a module of this name: the commands begin here.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = ("gossip", "topologies")
_HERE = Path(__file__).parent


def check_files(package: str) -> None:
    """Check that the files in a package's folder are those that this distribution has installed there.

    From a clone, or installed with ``pip install -e``, nothing is compared: nobody else installs into that folder.

    Raises
    ------
    ImportError
        Another distribution owns some of them; the one line names it, and what to do.
    """
    for record in _HERE.glob("gossip_training-*.dist-info/RECORD"):
        rows = [(row[0].split("/"), row[1]) for row in csv.reader(record.read_text().splitlines())]
        ours = {path[1]: digest for path, digest in rows if path[0] == package}
        folder = _HERE / package
        digest = base64.urlsafe_b64encode(hashlib.sha256((folder / "__init__.py").read_bytes()).digest()).decode()
        foreign = sorted(set(os.listdir(folder)) - ours.keys() - {"__pycache__"})
        if ours.get("__init__.py") != f"sha256={digest.rstrip('=')}":
            foreign.insert(0, "__init__.py")
        if foreign:
            raise ImportError(_text(package, f"{', '.join(foreign[:3])} in {folder}"))


def check() -> None:
    """Check the folders that Python finds, and their files.

    Raises
    ------
    ImportError
        Another distribution owns one of the names.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        found = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        if _HERE / package not in found:
            raise ImportError(_text(package, f"{found[0] if found else 'nothing'} in place of {_HERE / package}"))
        check_files(package)


def _text(package: str, what: str) -> str:
    owners = set(importlib.metadata.packages_distributions().get(package, ())) - {"gossip-training"}
    whose = f"the distribution {' and '.join(sorted(owners))}" if owners else "another distribution"
    return (
        f"{whose} also owns the package {package} of gossip-training (Python finds {what}): uninstall it, then run "
        "pip install --force-reinstall --no-deps gossip-training"
    )


def gossip() -> int:
    """Run the command ``gossip``, and return its exit status."""
    _begin()
    from gossip.lab.gossip_command import main

    return main()


def topologies() -> int:
    """Run the command ``topologies``, and return its exit status."""
    _begin()
    from topologies.__main__ import command

    return command()


def _begin() -> None:
    try:
        check()
    except ImportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _begin()
