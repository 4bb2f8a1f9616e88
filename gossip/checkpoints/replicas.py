"""What a checkpoint is made from and restored into, and what all processes do to it or fail at together.

Also the states of the random number generators that training draws from, as tensors and plain numbers,
and textual descriptions of a model, which can be compared with another rank's and with a checkpoint's.
"""

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch
from loguru import logger
from torch import nn

from gossip.errors import CheckpointError, ExchangeError, ManifestError, reason
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket, persistent_buffers
from gossip.parameters.manifest import describe_topology, first_difference
from gossip.parameters.names import named_parameters
from gossip.sharding.shard_mesh import Division
from gossip.step.state.kept_objects import KeptObjects

Divisions = Mapping[str, Division]
NOT_DIVIDED: Divisions = MappingProxyType({})


class Replicas(ABC):
    """The replicas that this process holds: those of the ``ranks``, of ``world_size`` in all processes.

    Attributes
    ----------
    process, num_processes : int
        The number of this process, and how many there are; process 0 writes what all have in common.
    place, num_shards : int
        Which shard of a replica the rank here holds, and of how many; the ranks of a shard group are consecutive.
    group_size : int
        The number of ranks that hold a replica together, each a shard of it or all of it.
    kept : KeptObjects
        What the model keeps beside the replicas.
    timeout : timedelta
        How long a process waits for the others.
    failure : Exception or None
        What the operation on these replicas is about to raise in every process: it ends everywhere, as with a result.
    """

    place: int = 0
    num_shards: int = 1
    group_size: int = 1
    failure: Exception | None = None

    ranks: range
    world_size: int
    process: int
    num_processes: int
    kept: KeptObjects
    timeout: timedelta

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of steps made."""

    @abstractmethod
    def gather(self, content: Any, what: str) -> list[Any]:
        """Return the plain data of all processes, in their order. Collective."""

    @abstractmethod
    def check_between_steps(self) -> None:
        """Raise GossipError unless the model is between two steps, where it can be saved and loaded."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe module, optimizers, buckets and topology as plain data for the manifest. Local."""

    @abstractmethod
    def check_savable(self) -> None:
        """Raise TypeError if the optimizers' or the modules' extra states cannot be saved. Local."""

    @abstractmethod
    def settle(self) -> None:
        """Await the messages in flight, and compare what must be equal on all ranks. Collective; before :meth:`states`.

        Raises ExchangeError: a message did not arrive.
        """

    @abstractmethod
    def states(self) -> Iterator[dict[str, Any]]:
        """Yield for each rank here the sections of its file, without the parts of the run. Local.

        Messages in flight are not applied: training continues as if nothing had been read.
        """

    @abstractmethod
    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of the shard here, from those of the shards of another division, in order. Local.

        Raises CheckpointError: they are not those of this model, or cannot be had here.
        """

    @abstractmethod
    def unfreeze(self, names: Sequence[str]) -> None:
        """Create buckets for these parameters, as when they were unfrozen in the run that was saved."""

    @abstractmethod
    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Restore each rank here from its sections, in place, and return what could not be restored, in words. Local.

        Without ``exchanges`` in the section ``engine``, no message is in flight.
        """

    @abstractmethod
    def exported(self) -> dict[str, torch.Tensor]:
        """Return name, shape and dtype of what :meth:`averages` yields, as tensors without values ("meta"). Local."""

    @abstractmethod
    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Return an iterator over the mean of each tensor in process 0, elsewhere None, by name. Collective.

        All processes must run through it to the end. No mean is computed before it is asked for; who drops each before
        the next holds a single one at a time.

        Raises ManifestError: the ranks' tensors differ in shape; raised in every process, before the iterator is
        returned.
        """


def run_on_all_ranks(replicas: Replicas, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run ``action`` in every process and return the results in the order of the processes. Collective.

    No process continues before all have finished or failed. So no rank is left waiting for one that has failed, and all
    remain in step.

    The action is local, and returns something that JSON can represent, since only JSON is sent.

    Raises CheckpointError: the action failed on some rank; raised on every rank, with rank and reason. A rank whose own
    caller passed an invalid argument raises that ``TypeError`` or ``ValueError`` instead; ExchangeError: a rank did not
    take part in time, and the ranks are no longer in step.
    """
    answer, failure = None, None
    try:
        answer = action()
    except ExchangeError:
        raise
    except Exception as error:
        failure = error
    message = {"answer": answer, "error": None if failure is None else reason(failure)}
    messages = replicas.gather(message, what)
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message["error"] is not None:
            ranks_by_reason.setdefault(message["error"], []).append(rank)
    if ranks_by_reason:
        if isinstance(failure, TypeError | ValueError):
            raise_on_all_ranks(replicas, failure)
        raise_on_all_ranks(replicas, CheckpointError(f"{what}: {_by_rank(ranks_by_reason, len(messages))}"), failure)
    return [message["answer"] for message in messages]


def compare(replicas: Replicas, entries: dict[str, str], what: str, advice: str = "") -> None:
    """Raise ManifestError on every rank if any two ranks' ``entries`` differ, with the first that does. Collective."""
    digests = run_on_all_ranks(replicas, what, lambda: hashlib.sha256(json.dumps(entries).encode()).hexdigest())
    if len(set(digests)) > 1:
        found = first_difference(run_on_all_ranks(replicas, what, lambda: entries))
        raise_on_all_ranks(replicas, ManifestError(f"{what}: {found}{advice}"))


def raise_on_all_ranks(replicas: Replicas, error: Exception, cause: Exception | None = None) -> NoReturn:
    """Raise an error, where all processes raise one: see :attr:`Replicas.failure`."""
    replicas.failure = error
    raise error from cause


def _by_rank(ranks_by_reason: dict[str, list[int]], world_size: int) -> str:
    parts = []
    for text, ranks in ranks_by_reason.items():
        if len(ranks) == world_size:
            return text if world_size == 1 else f"on every rank: {text}"
        parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
    return "; ".join(parts)


def rng_states() -> dict[str, Any]:
    """Return the states of torch (CPU, and CUDA if it is in use), Python and NumPy. Local."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": None,
    }
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 -- training may draw from it nevertheless
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] == "MT19937":
        states["numpy"] = [
            torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ]
    else:
        logger.warning("NumPy's global generator is a {}; its state is not saved", numpy_state["bit_generator"])
    return states


def restore_rng_states(states: dict[str, Any]) -> list[str]:
    """Set the states and return in words what could not be restored. Local."""
    left_out = []
    torch.set_rng_state(states["torch"])
    if states["cuda"] and (not torch.cuda.is_available() or torch.cuda.device_count() != len(states["cuda"])):
        left_out.append(f"the states of {len(states['cuda'])} CUDA generators: the devices here differ")
    elif states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if states["numpy"] is not None:
        key, pos, has_gauss, cached = states["numpy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), pos, has_gauss, cached))  # noqa: NPY002
    return left_out


def exported_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of everything in the module's state_dict, each tensor once."""
    for name, tensor in (*named_parameters(module), *persistent_buffers(module)):
        yield name, tensor.detach()


def describe_model(
    model: Any,
    optimizers: Mapping[str, str],
    buckets: Iterable[Bucket | BufferBucket],
    unfrozen: Iterable[Sequence[str]],
    divisions: Divisions = NOT_DIVIDED,
) -> dict[str, Any]:
    """Describe a GossipDataParallel or VirtualWorkers as plain data for the manifest."""
    return {
        "module": describe_module(model.module),
        "optimizers": optimizers,
        "buckets": describe_buckets(buckets, divisions),
        "unfrozen": [list(names) for names in unfrozen],
        "topology": describe_topology(model.topology),
        "compression": model.compression.describe(),
        "algorithm": type(model.algorithm).__name__,
    }


def describe_module(module: nn.Module, divisions: Divisions = NOT_DIVIDED) -> dict[str, str]:
    """Describe parameters and persistent buffers, which must match for a checkpoint to be loaded.

    ``divisions`` are those of a shard's parameters that have other shapes on other ranks, where the text is the same.
    """
    entries = {
        f"parameter {name!r}": describe_part(parameter, divisions.get(name))
        for name, parameter in named_parameters(module)
    }
    entries |= {f"buffer {name!r}": describe_part(buffer, None) for name, buffer in persistent_buffers(module)}
    return entries


def describe_optimizers(
    groups: Sequence[tuple[str, Sequence[Sequence[torch.Tensor]]]], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Describe types, groups and the place of each parameter, which state_dict() numbers without their names."""
    names = {id(parameter): repr(name) for name, parameter in named}
    entries = {"number of optimizers": str(len(groups))}
    for number, (kind, parameters_by_group) in enumerate(groups, 1):
        title = f"optimizer {number}" if len(groups) > 1 else "optimizer"
        entries[title] = kind
        entries[f"{title}, number of groups"] = str(len(parameters_by_group))
        for place, parameters in enumerate(parameters_by_group, 1):
            entries[f"{title}, group {place}, number of parameters"] = str(len(parameters))
            for index, parameter in enumerate(parameters, 1):
                entries[f"{title}, group {place}, parameter {index}"] = names.get(id(parameter), "outside the module")
    return entries


def describe_buckets(buckets: Iterable[Bucket | BufferBucket], divisions: Divisions = NOT_DIVIDED) -> list[str]:
    """Describe where each value lies in each bucket: a message in flight fits no other arrangement.

    It follows from the order of the parameters where these are divided unequally, so that each rank has others.
    """
    lines = []
    for bucket in buckets:
        kind = "trainable" if isinstance(bucket, Bucket) else "buffers"
        if not divisions.keys().isdisjoint(bucket.names):
            lines.append(f"{kind} {_name(bucket.block.dtype)}: {' '.join(bucket.names)}")
            continue
        views = zip(bucket.names, bucket.shape.views, strict=False)  # of buffers one, over all
        places = [f"{name}@{offset}{list(stride)}" for name, (_, stride, offset) in views]
        lines.append(f"{kind} {_name(bucket.block.dtype)} {bucket.block.numel()}: {' '.join(places)}")
    return lines


def describe_part(tensor: torch.Tensor, division: Division | None) -> str:
    """Describe dtype and shape of a tensor; of a part, those of the whole, and where the parts begin."""
    if division is None:
        return f"{_name(tensor.dtype)} {list(tensor.shape)}"
    return f"{_name(tensor.dtype)} {division.whole_shape(tensor.shape)} divided at {list(division.starts)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
