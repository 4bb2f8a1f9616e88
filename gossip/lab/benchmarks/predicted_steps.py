"""Steps predicted by :func:`gossip.simulate_time` from a probe of the same ranks: of these, and of many more nodes.

Nothing is fitted to the steps that are measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gossip import Workload, simulate_time
from gossip.lab.benchmarks.bench_methods import MethodSpecification, gossip_arguments
from gossip.lab.benchmarks.summaries import look
from gossip.lab.experiments.run_figures import drawn
from gossip.lab.probe.cluster_measuring import Measured
from gossip.lab.probe.compute_probe import COMPRESSION_RATIOS

BUCKET_CAP_MB = 25.0
"""With which ranks are probed; other buckets are not predicted."""
_NODES = 8, 16, 32, 64, 128, 256, 512, 1024
_LARGER = 1.3e9, 7e9
"""Numbers of parameters."""
_NUM_STEPS = 24
_PLAIN = {"local": "none", "ddp": "ddp", "fsdp": "fsdp"}
_OF_GOSSIP = {"topology", "algorithm", "compression"}


def predicted_s(probe: Measured, method: MethodSpecification, num_steps: int = 1000) -> float | None:
    """Return the time of a step in seconds; None of a method, or of options, that are not simulated. Local."""
    options, cluster = dict(method.options), probe.cluster
    is_as_probed = options.pop("bucket_cap_mb", BUCKET_CAP_MB) == BUCKET_CAP_MB
    if not is_as_probed or not options.keys() <= (_OF_GOSSIP if method.kind == "gossip" else set()):
        return None
    if method.kind in _PLAIN:
        return simulate_time(_PLAIN[method.kind], cluster, probe.workload, num_steps).step_time_s
    compression = options.pop("compression", None)
    if method.kind != "gossip" or (compression is not None and compression not in probe.coding_s):
        return None
    arguments = gossip_arguments(options, cluster.world_size)
    topology, ratio = arguments.pop("topology"), COMPRESSION_RATIOS.get(compression, 1.0)
    run = simulate_time(topology, cluster, probe.workload, num_steps, compression_ratio=ratio, **arguments)
    return run.step_time_s + probe.coding_s.get(compression, 0.0)


def draw_scaled(probe: Measured, methods: Sequence[MethodSpecification], link: str, path: Path) -> None:
    """Draw the predicted steps, relative to computing alone, of more nodes like those probed, and of larger models."""
    from matplotlib.ticker import LogLocator

    num_probed = probe.workload.model_bytes / 4
    with drawn(path, 11, 3.8) as figure:
        for axes, wanted in zip(figure.subplots(1, 1 + len(_LARGER), sharey=True), (0.0, *_LARGER), strict=True):
            num_parameters = max(wanted, num_probed)
            larger = scaled(probe, num_parameters / num_probed)
            alone_s = larger.workload.compute_s
            for number, method in enumerate(each for each in methods if each.kind != "local"):
                on_nodes = (replace(larger, cluster=replace(probe.cluster, num_nodes=nodes)) for nodes in _NODES)
                found = [predicted_s(each, method, _NUM_STEPS) for each in on_nodes]
                steps = [step_s / alone_s for step_s in found if step_s is not None]
                if steps:
                    axes.plot(_NODES, steps, marker=".", label=method.label, **look(number))
            axes.set(xscale="log", yscale="log", xlabel="nodes", title=f"{num_parameters / 1e9:.3g} billion parameters")
            axes.set_xticks(_NODES[::2], [f"{nodes:,}" for nodes in _NODES[::2]])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        figure.axes[0].set_ylabel("step, relative to its computation")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
        figure.suptitle(f"Predicted from a probe of {probe.cluster.num_nodes} nodes at {link}", fontsize=10)


def scaled(probe: Measured, factor: float) -> Measured:
    """Return what a model so many times as large would take: all times and buckets are in proportion."""

    def of(workload: Workload) -> Workload:
        spent = {name: factor * getattr(workload, name) for name in ("forward_s", "backward_s", "update_s", "mix_s")}
        return replace(workload, bucket_bytes=tuple(round(factor * each) for each in workload.bucket_bytes), **spent)

    coding_s = {name: factor * seconds for name, seconds in probe.coding_s.items()}
    return replace(probe, workload=of(probe.workload), coding_s=coding_s)
