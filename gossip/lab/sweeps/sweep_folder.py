"""The folder of a sweep without an experiment: the same sweep finds it again, even with additional values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_OPTION = "hydra.sweep.dir"
_NOT_OF_THE_NAME = ("seed", "figures", "output_root", "sweep", "hydra")
"""Config keys and sections that do not distinguish one sweep from another."""


def option(arguments: Sequence[str]) -> list[str]:
    """Return the option that sets the folder of a sweep, as the only entry of a list.

    It is empty where ``experiment=`` or ``hydra.sweep.dir=`` determines the folder, and for arguments that hydra cannot
    parse, which it reports itself.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        overrides = OverridesParser.create().parse_overrides([each for each in arguments if each[:1] != "-"])
    except OverrideParseException:
        return []
    if {_OPTION, "experiment"} & {override.key_or_group for override in overrides}:
        return []
    parts = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if key.partition(".")[0].partition("/")[0] not in _NOT_OF_THE_NAME:
            is_swept = override.is_sweep_override()
            parts[key] = key if is_swept else f"{key}={override.get_value_element_as_str()}"
    return [f"{_OPTION}=${{output_root}}/sweeps/{name(list(parts.values()))}"]


def name(parts: Sequence[str]) -> str:
    """Return a folder name for the swept keys and the ``key=value`` of the others, independent of their order.

    Examples
    --------
    >>> name(["topology", "launch.world_size=8"]) == name(["launch.world_size=8", "topology"])
    True
    >>> name(["topology", "launch.world_size=8"])
    'world_size-8_topology_4b9e824c'
    """
    parts = sorted(parts)
    short = [
        f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in (part.partition("=") for part in parts)
    ]
    slug = "_".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in short) or "defaults"
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return f"{slug[:80]}_{digest}"
