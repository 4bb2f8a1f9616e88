"""The families of topologies; importing one of these modules registers what it defines.

A family is one function, in the module of its kind. It states its rounds in closed form; tests/topologies holds each
to the properties that its docstring claims. The examples begin after ``import topologies``.
"""

from topologies.families import base_graphs as base_graphs
from topologies.families import de_bruijn as de_bruijn
from topologies.families import equitopo as equitopo
from topologies.families import expanders as expanders
from topologies.families import given_graph as given_graph
from topologies.families import graph_matchings as graph_matchings
from topologies.families import one_peer as one_peer
from topologies.families import random_graphs as random_graphs
from topologies.families import social_networks as social_networks
from topologies.families import static_families as static_families
from topologies.families import uniform_groups as uniform_groups
