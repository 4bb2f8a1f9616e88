"""The families of topologies; importing one of these modules registers what it defines.

A family is one function, in the module of its kind. It states its rounds in closed form; tests/topologies holds each
to the properties that its docstring claims.
"""

from topologies.families import base as base
from topologies.families import de_bruijn as de_bruijn
from topologies.families import equitopo as equitopo
from topologies.families import expanders as expanders
from topologies.families import graphs as graphs
from topologies.families import groups as groups
from topologies.families import matchings as matchings
from topologies.families import one_peer as one_peer
from topologies.families import random as random
from topologies.families import random_graphs as random_graphs
from topologies.families import social as social
from topologies.families import static as static

__all__ = [
    "base",
    "de_bruijn",
    "equitopo",
    "expanders",
    "graphs",
    "groups",
    "matchings",
    "one_peer",
    "random",
    "random_graphs",
    "social",
    "static",
]
