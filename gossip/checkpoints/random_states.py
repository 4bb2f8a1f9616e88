"""The states of the random number generators that training draws from, as tensors and plain numbers."""

import random
from typing import Any

import numpy as np
import torch
from loguru import logger


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
