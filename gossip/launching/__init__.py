"""Launching ranks on this machine, and joining ranks that torchrun or SLURM started."""

from gossip.launching.joining import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
from gossip.launching.joining import Placement as Placement
from gossip.launching.joining import find_placement as find_placement
from gossip.launching.joining import joined_process_group as joined_process_group
from gossip.launching.launcher import launch as launch
from gossip.launching.launcher import signals_for_workers as signals_for_workers
from gossip.launching.rendezvous import GROUPS as GROUPS
from gossip.launching.rendezvous import STORE as STORE
from gossip.launching.rendezvous import serve as serve
