"""Measure the time and the bytes until the averaged model reaches all-reduce's final loss plus 1 %, in the lab.

    sudo python scripts/time_to_loss.py outputs/time_to_loss
    sudo python scripts/time_to_loss.py outputs/quick links=[200mbit] tasks=[digits_cnn] seeds=[0]
    python scripts/time_to_loss.py outputs/loopback network=loopback steps=20

The options are those of configs/time_to_loss.yaml. Every worker is a host of its own behind a shaped link (network
namespaces: Linux, root, iproute2); all methods train in the same processes, in turns.
"""

import sys

from gossip.lab.benchmarks.harness import main
from gossip.lab.benchmarks.time_to_loss import TimeToLoss
from gossip.lab.gossip_command import config_folder

if __name__ == "__main__":
    sys.exit(main(TimeToLoss, __doc__, config_folder() / "time_to_loss.yaml"))
