"""What importing the package does: load little, and do nothing."""

from __future__ import annotations

import json
import subprocess
import sys

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
    forbidden = {"hydra", "omegaconf", "matplotlib", "lightning", "sklearn", "safetensors", "tensorboard", "rich"}
    assert not forbidden & set(seen["modules"])
    assert not seen["compiler"]  # a second, of which most programs need nothing
    assert seen["threads"] == 1
    assert seen["environment"]
    assert not seen["initialised"]
    assert seen["handlers"] == 1
    assert seen["missing"] == []
    assert run.stderr == ""
