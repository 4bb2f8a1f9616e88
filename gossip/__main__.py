"""``python -m gossip``, the command ``gossip`` by another name."""

import sys

from gossip_training import gossip

if __name__ == "__main__":  # the workers that it starts import it, too
    sys.exit(gossip())
