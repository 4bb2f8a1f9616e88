"""Ranges on the timeline of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function

#: By name, a range that is open within a ``with``. torch's own faster kind where it has that, private there: every
#: bucket of every step opens four, and without a profiler that must cost nothing.
profiler_range: Callable[[str], AbstractContextManager[Any]] = getattr(
    torch._C._profiler, "_RecordFunctionFast", record_function
)
