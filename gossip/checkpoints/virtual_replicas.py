"""The replicas of all ranks, held by virtual workers in one process."""

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.checkpoints.replicas import Replicas, describe_model, describe_optimizers, exported_tensors, rng_states
from gossip.errors import CheckpointError, GossipError
from gossip.optimizers.scopes import IMPLEMENTATION, elementwise_keys, has_shape
from gossip.parameters.buffers import unfit_buffers
from gossip.parameters.digests import bytes_of
from gossip.parameters.serializable_state import compact
from gossip.private_torch import is_in_backward
from gossip.step.state.algorithm_state import algorithm_state, load_algorithm_state
from gossip.step.state.replica_state import optimizer_state
from gossip.virtual.shards import Shard, average_of, deal_, written
from gossip.virtual.workers import VirtualWorkers
from gossip.wrapper import DEFAULT_TIMEOUT

_OF_STACKS = ("params", "param_names")  # the entries of a group that depend on the number of devices


class StackedOptimizer:
    """An optimizer over stacks, [k, *shape], as checkpoints see it; the stacks of one parameter are consecutive."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard]) -> None:
        self._optimizer, self._shards, self._num_shards = optimizer, shards, len(shards)

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        """The stacks of the first shard, by group."""
        return [list(group["params"][:: self._num_shards]) for group in self._optimizer.param_groups]

    def _held(self) -> list[list[torch.Tensor]]:
        """Return the stacks of each parameter, in the order of the groups."""
        stacks = [stack for group in self._optimizer.param_groups for stack in group["params"]]
        return [stacks[start : start + self._num_shards] for start in range(0, len(stacks), self._num_shards)]

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        """The state of all ranks; TypeError if it holds something that cannot be saved."""
        return optimizer_state(self._optimizer, (named for shard in self._shards for named in shard.parameters.items()))

    def state_of(self, shard: int, row: int) -> dict[str, Any]:
        """Return what ``state_dict()`` of a single rank's own optimizer would return."""
        num_shards, held = self._num_shards, self._held()
        state = {
            number: {
                key: compact(value[row], key) if has_shape(value, stacks[shard]) else value
                for key, value in self.state["state"][number * num_shards + shard].items()
            }
            for number, stacks in enumerate(held)
            if number * num_shards + shard in self.state["state"]
        }
        groups = []
        for group in self.state["param_groups"]:
            own = {key: group[key][::num_shards] for key in _OF_STACKS if key in group}
            groups.append({**group, **own, "params": [number // num_shards for number in own["params"]]})
        return {"state": state, "param_groups": groups}

    def load(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Load the states of single ranks, and return in words what could not be restored."""
        optimizer = self._optimizer
        optimizer.state.clear()
        held = self._held()
        entries = [[state["state"].get(number) for state in states] for number in range(len(held))]
        known: list[Mapping[str, Any]] = [
            next((entry for entry in of_ranks if entry is not None), {}) for of_ranks in entries
        ]
        stacked = elementwise_keys((stacks[0][0], entry) for stacks, entry in zip(held, known, strict=True))
        differing: dict[str, None] = {}
        for stacks, of_ranks, first in zip(held, entries, known, strict=True):
            for key, value in first.items():
                if key in stacked:
                    rows = [torch.zeros_like(value) if entry is None else entry[key] for entry in of_ranks]
                    for shard, stack in zip(self._shards, stacks, strict=True):
                        own = torch.stack(rows[shard.ranks.start : shard.ranks.stop])
                        optimizer.state[stack][key] = own.to(stack.device)
                    continue
                for stack in stacks:
                    optimizer.state[stack][key] = copy.deepcopy(value)
                if not _all_equal(entry[key] for entry in of_ranks if entry is not None):
                    differing[key] = None
        for group, saved in zip(optimizer.param_groups, states[0]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in (*_OF_STACKS, *IMPLEMENTATION)})
        name = type(optimizer).__name__
        return [f"{key!r} of {name}, which differed between ranks and is now rank 0's" for key in differing]


def _all_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value for value in others)


class VirtualReplicas(Replicas):
    """The replicas of virtual workers."""

    process, num_processes, timeout = 0, 1, DEFAULT_TIMEOUT

    def __init__(self, workers: VirtualWorkers) -> None:
        self._workers = workers
        self.kept = workers._kept
        self._shards, self._updater, self._exchanges = workers._shards, workers._updater, workers._exchanges
        self.world_size = workers.world_size
        self.ranks = range(workers.world_size)
        self._optimizers = [StackedOptimizer(optimizer, self._shards) for optimizer in workers._optimizers]

    @property
    def step(self) -> int:
        return self._workers.step

    def gather(self, content: Any, what: str) -> list[Any]:
        del what
        return [content]

    def check_between_steps(self) -> None:
        if is_in_backward():
            raise GossipError(f"step {self.step} is in progress; save and load after backward()")
        if self._workers._is_averaged:
            raise GossipError(
                f"step {self.step}: nothing can be saved or loaded inside averaged(); leave the block first"
            )
        if self._workers._replay is not None:
            raise GossipError(
                f"step {self.step}: a replay can be neither saved nor loaded, because its replicas are at different "
                "steps; run it again, which gives the same result"
            )
        self._updater.stack_new_groups()

    def describe(self) -> dict[str, Any]:
        workers = self._workers
        kinds = [type(optimizer).__name__ for optimizer in workers._optimizers]
        groups = [(kind, own.groups) for kind, own in zip(kinds, self._optimizers, strict=True)]
        optimizers = describe_optimizers(groups, self._shards[0].parameters.items())
        return describe_model(workers, optimizers, self._exchanges.buckets, workers._released)

    def check_savable(self) -> None:
        for optimizer in self._optimizers:
            _ = optimizer.state
        for rank in self.ranks:
            self._workers._calls.extra_states(rank)

    def settle(self) -> None:
        """Do nothing, as everything in flight has already arrived."""

    @torch.no_grad()
    def states(self) -> Iterator[dict[str, Any]]:
        exchanges, algorithm = self._exchanges.rank_states(), algorithm_state(self._exchanges)
        differing = self._differing()
        samples = None if self._exchanges.samples is None else torch.as_tensor(self._exchanges.samples).tolist()
        for number, shard in enumerate(self._shards):
            for row, rank in enumerate(shard.ranks):
                yield {
                    "parameters": _rows(shard.parameters, row),
                    "buffers": _rows(shard.buffers, row),
                    "gradients": _rows(self._gradients_of(shard, rank), row),
                    "extra": self._workers._calls.extra_states(rank),
                    "optimizers": [optimizer.state_of(number, row) for optimizer in self._optimizers],
                    "engine": {
                        "step": self.step,
                        "exchanges": next(exchanges),
                        "algorithm": {
                            **algorithm,
                            "kept": {state: _rows(by_name, rank) for state, by_name in algorithm["kept"].items()},
                            "numbers": _rows(algorithm["numbers"], rank),
                        },
                        "samples": None if samples is None else samples[rank],
                        "frozen": {"differing": list(differing)},
                        "num_bad_steps": int(self._updater.num_bad_steps[rank]),
                        "gradient_scale": float(self._updater.scales[rank]),
                    },
                    "rng": rng_states() if rank == 0 else None,
                }

    def _differing(self) -> list[str]:
        """Return the names of the frozen parameters that are not equal in all replicas."""
        first = self._shards[0].parameters
        return [
            name
            for name in self._workers._frozen
            if any(
                not torch.equal(bytes_of(row), bytes_of(first[name][0].to(row.device)))
                for shard in self._shards
                for row in shard.parameters[name]
            )
        ]

    def _gradients_of(self, shard: Shard, rank: int) -> dict[str, torch.Tensor]:
        """Return the stacks of those gradients of which the rank has its own."""
        if not self._updater.scales[rank]:
            return {}
        reached = self._updater.reached
        return {
            name: stack.grad
            for name, stack in shard.parameters.items()
            if stack.grad is not None and (name not in reached or reached[name][rank])
        }

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        raise CheckpointError(
            f"it is of replicas in {len(states)} shards, but virtual workers have whole ones; load it in processes"
        )

    def unfreeze(self, names: Sequence[str]) -> None:
        self._workers._unfreeze(names)

    @torch.no_grad()
    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        workers, updater, engines = self._workers, self._updater, [state["engine"] for state in states]
        left_out = self._restore_values(states)
        left_out += workers._calls.load_extra_states([state.get("extra", {}) for state in states])
        self._restore_gradients(states)
        for number, optimizer in enumerate(self._optimizers):
            left_out += optimizer.load([state["optimizers"][number] for state in states])
        updater.num_bad_steps = torch.tensor([engine.get("num_bad_steps", 0) for engine in engines])
        workers.step = engines[0]["step"]
        in_flight = [engine.get("exchanges") for engine in engines]
        self._exchanges.load_rank_states(None if None in in_flight else in_flight)
        samples = [engine.get("samples") for engine in engines]
        self._exchanges.weigh(None if None in samples else torch.tensor(samples, dtype=torch.float64))
        left_out += load_algorithm_state(self._exchanges, _stacked_algorithm(engines))
        written(self._shards)
        return left_out

    def _restore_values(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        for name in self._shards[0].parameters:
            deal_([shard.parameters[name] for shard in self._shards], [state["parameters"][name] for state in states])
        left_out = unfit_buffers(self._workers.module, *(state["buffers"] for state in states))
        for name in self._shards[0].buffers.keys() - left_out:
            deal_([shard.buffers[name] for shard in self._shards], [state["buffers"][name] for state in states])
        return list(left_out.values())

    def _restore_gradients(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._updater.drop_gradients()
        scales = [state["engine"].get("gradient_scale", float(bool(state["gradients"]))) for state in states]
        self._updater.scales = torch.tensor(scales, dtype=torch.float64)
        for name in dict.fromkeys(name for state in states for name in state["gradients"]):
            gradients = [state["gradients"].get(name) for state in states]
            for shard in self._shards:
                stack = shard.parameters[name]
                stack.grad = torch.zeros_like(stack)
                for row, rank in enumerate(shard.ranks):
                    if (gradient := gradients[rank]) is not None:
                        stack.grad[row].copy_(gradient)
            reached = torch.tensor([gradient is not None for gradient in gradients])
            if self._workers.is_vectorised:
                reached |= self._updater.scales == 0  # the next gradient of a rank without any reaches everything
            if not bool(reached.all()):
                self._updater.reached[name] = reached

    def exported(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in exported_tensors(self._workers.module)}

    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        weights = self._exchanges.weights()
        for name, _ in exported_tensors(self._workers.module):
            yield name, average_of(self._shards, name, weights)


def _rows(stacks: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {name: compact(stack[row], name) for name, stack in stacks.items()}


def _stacked_algorithm(engines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Stack what the ranks' algorithms keep into the state for all replicas."""
    saved: list[Mapping[str, Any]] = [engine["algorithm"] for engine in engines if "algorithm" in engine]
    if len(saved) < len(engines):
        return None
    kept = {state: _stacked([of_rank["kept"][state] for of_rank in saved]) for state in saved[0]["kept"]}
    return {**saved[0], "kept": kept, "numbers": _stacked([of_rank["numbers"] for of_rank in saved])}


def _stacked(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
