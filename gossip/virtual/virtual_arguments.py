"""The arguments specific to virtual workers, checked before anything is built."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gossip.parameters.buckets import check_dense, check_parameters
from gossip.parameters.parameter_slots import check_not_wrapped
from topologies.validation import check_real


def make_module(module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the module itself, or the one that a function makes, if its replicas can be stacked.

    Raises ValueError, TypeError: it is not a module, has no parameters, or has some that cannot be used.
    """
    found = module if isinstance(module, nn.Module) or not callable(module) else module()
    if not isinstance(found, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module or a function that makes one, got {type(found).__name__}")
    check_parameters(found)
    check_not_wrapped(found)
    check_dense(found, "and the gradients of stacked parameters are dense")
    if next(found.parameters(), None) is None:
        raise ValueError(f"module {type(found).__name__} has no parameters: there is nothing to train or to mix")
    return found


def resolve_devices(devices: Sequence[torch.device | str] | None, world_size: int) -> list[torch.device]:
    """Return the devices that are named; by default the first GPU if there is one, otherwise the CPU."""
    if devices is None:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(
            f'devices must be a sequence of at least one device, such as ["cuda:0", "cuda:1"], got {devices!r}'
        )
    if len(devices) > world_size:
        raise ValueError(
            f"devices names {len(devices)} devices for {world_size} replicas; give at most one per replica"
        )
    try:
        return [torch.device(device) for device in devices]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'devices must name devices of torch, such as "cpu" or "cuda:0", got {devices!r}') from error


def checked_samples(samples: Sequence[float], world_size: int) -> torch.Tensor:
    """Return the numbers of samples of all replicas, [n], float64; raise ValueError if they cannot be that."""
    if len(samples) != world_size:
        raise ValueError(f"samples must have one number for each of the {world_size} replicas, got {len(samples)}")
    named = {f"samples[{rank}]": each for rank, each in enumerate(samples)}
    checked = [check_real(name, each, "above 0 and finite", example=32) for name, each in named.items()]
    return torch.tensor(checked, dtype=torch.float64)
