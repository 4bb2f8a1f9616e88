"""Pictures of topologies: their rounds, their mixing matrices and how fast they mix. Needs matplotlib."""

from topologies.drawing.comparison_figure import draw_comparison as draw_comparison
from topologies.drawing.layouts import Layout as Layout
from topologies.drawing.layouts import layout_of as layout_of
from topologies.drawing.topology_pictures import draw as draw
from topologies.drawing.topology_pictures import draw_compact as draw_compact

__all__ = ["Layout", "draw", "draw_compact", "draw_comparison", "layout_of"]
