"""Where the files of the project are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
GOSSIP = REPOSITORY / "gossip"
