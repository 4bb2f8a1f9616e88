"""Pictures of topologies: their rounds, their mixing matrices and how fast they mix. Needs matplotlib."""

from topologies.drawing.comparison_figure import draw_comparison
from topologies.drawing.round_pictures import Layout, layout_of
from topologies.drawing.topology_pictures import draw, draw_compact

__all__ = ["Layout", "draw", "draw_compact", "draw_comparison", "layout_of"]
