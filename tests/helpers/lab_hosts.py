"""Where there can be hosts of network namespaces."""

from gossip.lab.benchmarks.network import shaped_hosts
from gossip.lab.benchmarks.network.shaped_hosts import Namespace


def why_no_hosts() -> str | None:
    """What is missing here for a :class:`gossip.lab.benchmarks.network.shaped_hosts.Lab`; None if nothing is."""
    missing = shaped_hosts.what_is_missing()
    if missing is None:
        try:
            Namespace().close()
        except OSError as error:
            missing = f"network namespaces are not permitted here ({error.strerror})"
    return missing
