"""Which changes are allowed in a module whose replicas are stacked."""

import torch
from torch import nn

from gossip.errors import GossipError
from gossip.parameters.names import named_parameters
from gossip.parameters.parameter_slots import ModuleSnapshot


class StackedSlots(ModuleSnapshot):
    """Refuses parameters that were added, removed or reshaped since the replicas were made from the module.

    A new one would be equal for all replicas, and not be trained. Replacing one by another of the same shape has no
    effect, because calls put each replica's own parameter in its place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._shapes = self._find_shapes()

    def check(self, *, has_copies: bool) -> None:
        """Raise GossipError if a parameter was changed, and with copies also if a part was; cheap if nothing was.

        ``has_copies`` says whether replicas are run by copies, which have the parts that the module had when it was
        copied.
        """
        if not self.has_changed():
            return
        shapes = self._find_shapes()
        for name in (*shapes, *self._shapes):
            if shapes.get(name) != self._shapes.get(name):
                what = "removed" if name not in shapes else "replaced" if name in self._shapes else "added"
                raise GossipError(
                    f"parameter {name!r} was {what} after the replicas were made, which do not follow this change; "
                    "change the module before making VirtualWorkers from it"
                )
        if has_copies:
            raise GossipError(
                "parts of the module were added, replaced or removed after its replicas had been copied in order to "
                "run one after the other; change the module before making VirtualWorkers from it"
            )
        self.remember()

    def _find_shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in named_parameters(self._module, remove_duplicate=False)}
