"""The description of what must be equal on every rank, compared before the first exchange.

gloo checks nothing: with another shape the process aborts, and with another dtype or order the data are silently wrong.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gossip.communication.world import World
from gossip.errors import ManifestError
from gossip.parameters.names import bare_module, named_buffers, named_parameters
from topologies import Topology
from topologies.version import __version__

Manifest = dict[str, str]
CONSTRUCTION = "construction"
_NUM_SAMPLED_ROUNDS = 8  # for an aperiodic schedule, which cannot be written down in full


def build_manifest(module: nn.Module, topology: Topology, settings: Mapping[str, str], replica: str) -> Manifest:
    """Describe what this rank is about to train, one line of text per entry, the coarse entries first.

    ``settings`` are the wrapper's other arguments, in words, and ``replica`` says who holds one.
    """
    manifest = {
        CONSTRUCTION: "accepted",
        "gossip version": __version__,
        "torch version": torch.__version__,
        "byte order": sys.byteorder,
        "replica": replica,
        "module": type(bare_module(module)).__name__,
        "topology": describe_topology(topology),
    }
    for kind, tensors in (("parameter", named_parameters(module)), ("buffer", named_buffers(module))):
        for place, (name, tensor) in enumerate(tensors, 1):
            manifest[f"{kind} {place}"] = _describe(name, tensor)
    manifest.update(settings)  # last: an optimizer differs wherever its module does
    return manifest


def compare_manifests(
    world: World,
    manifest: Manifest,
    what: str = "comparing manifests",
    advice: str = "build module, optimizer and topology the same way everywhere",
) -> None:
    """Raise on every rank if any two ranks' manifests differ. Collective.

    Raises ManifestError: two ranks differ; the text names the first entry that differs and both values.
    """
    digests = world.gather_bytes(hashlib.sha256(json.dumps(manifest).encode()).digest(), what)
    if len(set(digests)) > 1:
        found = first_difference(world.gather_json(manifest, what))
        raise ManifestError(f"the ranks do not train the same thing: {found}; {advice}")


def check_manifest(published: Manifest, manifest: Manifest, rank: int) -> None:
    """Raise ManifestError if a joining rank has built something different from the others. Local."""
    if found := first_difference([published, manifest]):
        raise ManifestError(
            f"rank {rank} cannot join: {found.key} is {found.other} here, but {found.first} on the ranks that train; "
            "build module, optimizer and topology the same way everywhere"
        )


class Difference(NamedTuple):
    """An entry in which a manifest differs from the first one, with both values, and the number of that manifest."""

    key: str
    first: str
    other: str
    number: int

    def __str__(self) -> str:
        return f"{self.key} is {self.first} on rank 0, but {self.other} on rank {self.number}"


def first_difference(manifests: Sequence[Mapping[str, str]]) -> Difference | None:
    """Return the first entry in which some manifest differs from the first one, or None."""
    for key in dict.fromkeys(key for manifest in manifests for key in manifest):
        values = [manifest.get(key, "nothing") for manifest in manifests]
        for number, value in enumerate(values):
            if value != values[0]:
                return Difference(key, values[0], value, number)
    return None


def describe_topology(topology: Topology) -> str:
    """Return text that tells topologies apart, by their first rounds if they are aperiodic."""
    texts = []
    for phase in topology.phases:
        part = phase.topology
        if part.registered or part.period is not None:
            text = part.to_json()
        else:
            text = f"{part!r} {json.dumps([part.round(step).to_dict() for step in range(_NUM_SAMPLED_ROUNDS)])}"
        texts.append(text if topology is part else f"from round {phase.start}, every {phase.every}: {text}")
    return "; ".join(texts)


def _describe(name: str, tensor: torch.Tensor) -> str:
    text = f"{name!r} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} strides {list(tensor.stride())}"
    return text + " frozen" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
