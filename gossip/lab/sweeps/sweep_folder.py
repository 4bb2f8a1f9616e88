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
    by_key = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if key.partition(".")[0].partition("/")[0] not in _NOT_OF_THE_NAME:
            is_swept = override.is_sweep_override()
            by_key[key] = key if is_swept else f"{key}={override.get_value_element_as_str()}"
    parts = sorted(by_key.values())
    slug = "_".join(re.sub(r"[^\w.]+", "-", re.sub(r"^[^=]*\.", "", part)).strip("-") for part in parts) or "defaults"
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return [f"{_OPTION}=${{output_root}}/sweeps/{slug[:80]}_{digest}"]
