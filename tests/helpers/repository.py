"""Where the files of the project are."""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
GOSSIP = REPOSITORY / "gossip"
NOT_BUILT_FROM = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "outputs", "*.egg-info", "__pycache__", ".*_cache", "*.so"
)
