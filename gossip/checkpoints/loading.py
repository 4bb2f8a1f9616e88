"""Resume from a checkpoint."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger

from gossip.checkpoints import checkpoint_folder as layout_on_disk
from gossip.checkpoints.checkpoint_files import read_tensors
from gossip.checkpoints.replicas import Replicas, raise_on_all_ranks, restore_rng_states, run_on_all_ranks
from gossip.checkpoints.resizing import mean_state
from gossip.checkpoints.trained_models import TrainedModel, collectively
from gossip.errors import CheckpointError
from gossip.parameters.manifest import first_difference
from gossip.step.state.kept_objects import KeptObjects, Stateful, is_stateful


@dataclass(frozen=True)
class Checkpoint:
    """The result of loading a checkpoint.

    Attributes
    ----------
    step : int
        The step at which it was saved, and at which the model is now.
    path : Path
        The folder of the checkpoint.
    world_size : int
        The number of ranks that saved it.
    data : dict
        The plain data that were passed to :func:`gossip.save`, by name: this rank's, or rank 0's with virtual workers.
    """

    step: int
    path: Path
    world_size: int
    data: dict[str, Any]


class _Contents(NamedTuple):
    """What this process needs of a checkpoint, verified and read: the states of its ranks."""

    path: Path
    manifest: dict[str, Any]
    states: Sequence[dict[str, Any]]

    @property
    def common(self) -> dict[str, Any]:
        """The state that belongs to the process rather than to a rank: parts, data, random numbers."""
        return self.states[0]


@torch.inference_mode(False)
def load(model: TrainedModel, path: str | os.PathLike[str], **parts: Any) -> Checkpoint:
    """Restore a checkpoint into ``model``, what it keeps (``model.keep``) and ``parts``, in place. Collective.

    With the same number of ranks and processes, and the same buckets and topology as when it was saved, the run
    continues bit for bit as if it had never stopped. Otherwise a warning is logged, and it continues as follows:

    - With other buckets or another topology, from every rank's own state, without the messages that were in flight.
    - With the same ranks, which are now processes and were virtual workers, or vice versa, from every rank's own state
      and messages in flight, but with new random numbers.
    - With another number of ranks, every rank has the mean over the old ranks of parameters, float buffers and the
      optimizer's float tensors; everything else is that of the old rank 0, and random numbers are new.

    Parameters
    ----------
    model : GossipDataParallel or VirtualWorkers
        The model, between two steps.
    path : path
        Either a folder of checkpoints, of which the newest valid one is loaded (a warning names every newer one and its
        defect), or a single checkpoint.
    **parts
        The objects whose states were passed to :func:`gossip.save`, or were kept by the model that was saved, by the
        same names; not what the model here keeps.

    Returns
    -------
    Checkpoint
        The step, the path and the plain data of the checkpoint.

    Raises
    ------
    CheckpointError
        There is no valid checkpoint, or it is of another module, other optimizers or other parts; raised on every rank
        before anything has been changed.
    TypeError, ValueError
        A part has no ``load_state_dict()``, or the name of an object that the model keeps; raised before anything has
        been changed.
    ExchangeError
        A rank did not take part within the model's ``timeout``.

    Notes
    -----
    Size and SHA-256 of every file are verified before it is unpickled, and unpickling creates only tensors and plain
    data.

    Examples
    --------
    >>> import functools, gossip, torch
    >>> optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    >>> model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), optimizer, "ring")
    >>> scheduler = torch.optim.lr_scheduler.ConstantLR(model.optimizer)
    >>> path = gossip.save(model, "checkpoints", scheduler=scheduler, batch=17)
    >>> checkpoint = gossip.load(model, "checkpoints", scheduler=scheduler)
    >>> checkpoint.step, checkpoint.data["batch"]
    (0, 17)
    """
    return collectively(model, lambda replicas: _load(replicas, Path(path), parts))


def _load(replicas: Replicas, path: Path, parts: Mapping[str, Any]) -> Checkpoint:
    replicas.check_between_steps()
    kinds = run_on_all_ranks(replicas, f"gossip.load from {path}", lambda: _check_call(path, replicas.kept, parts))
    parts = replicas.kept.with_parts(parts)
    contents = _read_one(replicas, path) if any(kinds) else _read_newest(replicas, path)
    manifest = contents.manifest

    run_on_all_ranks(replicas, f"{contents.path} does not fit", lambda: _check_fit(replicas, contents, parts))
    for names in manifest.get("unfrozen", ()):
        replicas.unfreeze(names)  # recreate the buckets that the run had when it was saved
    changes, keeps_exchanges = _changes(replicas, manifest)
    if not keeps_exchanges:
        for state in contents.states:
            state["engine"] = {key: value for key, value in state["engine"].items() if key != "exchanges"}
    what = f"restoring {contents.path} (the model is partly loaded; load again, or construct a new one)"
    try:
        left_out = run_on_all_ranks(replicas, what, lambda: _restore(replicas, contents, parts))
    except Exception:
        replicas.failure = None  # not an end like others: some ranks are at the checkpoint's step, and some are not
        raise
    if replicas.process == 0:
        _report(contents, changes + left_out[0], parts)
    return Checkpoint(manifest["step"], contents.path, manifest["world_size"], contents.common["data"])


def _restore(replicas: Replicas, contents: _Contents, parts: Mapping[str, Stateful]) -> list[str]:
    left_out = replicas.restore(contents.states)
    for name, part in parts.items():
        part.load_state_dict(contents.common["stateful"][name])
    numbers = contents.common.get("rng")
    if numbers is not None and contents.manifest["num_processes"] == replicas.num_processes:
        left_out += restore_rng_states(numbers)  # last, because the calls above may have drawn random numbers
    return left_out


def _check_call(path: Path, kept: KeptObjects, parts: Mapping[str, Any]) -> bool:
    kept.wait_for_save()
    kept.with_parts(parts)
    for name, part in parts.items():
        if not is_stateful(part):
            raise TypeError(
                f"{name} is a {type(part).__name__}, which has no load_state_dict(); leave it out: plain data are "
                "returned in the result's data"
            )
    return layout_on_disk.is_step_folder(path)


# ---------------------------------------------------------------------- choosing a checkpoint


def _read_one(replicas: Replicas, path: Path) -> _Contents:
    contents, reason = _read_together(replicas, path)
    if contents is None:
        raise_on_all_ranks(replicas, CheckpointError(f"this checkpoint cannot be loaded: {reason}"))
    return contents


def _read_newest(replicas: Replicas, path: Path) -> _Contents:
    """Find the newest checkpoint that is valid on all ranks, which go through them together, the newest first."""
    names: list[str] = []
    rejected: list[str] = []
    run_on_all_ranks(replicas, f"gossip.load from {path}", lambda: names.extend(layout_on_disk.find_checkpoints(path)))
    while True:
        proposals = run_on_all_ranks(replicas, f"choosing from {path}", lambda: names[0] if names else None)
        if not any(proposals):
            found = "; ".join(rejected) or "there is none in it"
            raise_on_all_ranks(replicas, CheckpointError(f"no valid checkpoint in {path}: {found}"))
        name = max((proposal for proposal in proposals if proposal), key=layout_on_disk.age_key)
        if names and names[0] == name:
            names.pop(0)
        contents, reason = _read_together(replicas, path / name, layout_on_disk.age_key(name)[0])
        if contents is not None:
            return contents
        rejected.append(reason)
        if replicas.process == 0:
            logger.warning("checkpoint {} is skipped: {}", name, reason)


def _read_together(replicas: Replicas, path: Path, step: int | None = None) -> tuple[_Contents | None, str]:
    """Read a checkpoint, of ``step`` by its name, in every process; or return what is wrong with it. Collective."""
    contents: _Contents | None = None

    def read() -> dict[str, str]:
        nonlocal contents
        try:
            contents = _read(path, replicas)
            saved_at = contents.manifest["step"]
            if step not in (None, saved_at):
                raise CheckpointError(f"{path} was renamed: it was saved at step {saved_at}")
        except CheckpointError as error:
            return {"reason": f"rank {replicas.process}: {error}" if replicas.num_processes > 1 else str(error)}
        return {"digest": layout_on_disk.digest_of(contents.manifest)}

    findings = run_on_all_ranks(replicas, f"reading {path}", read)
    reasons = list(dict.fromkeys(finding["reason"] for finding in findings if "reason" in finding))
    if not reasons and any(finding != findings[0] for finding in findings):
        reasons = [f"the ranks see different checkpoints under {path}; all ranks must share the folder"]
    return None if reasons else contents, "; ".join(reasons)


# ---------------------------------------------------------------------- reading


def _read(path: Path, replicas: Replicas) -> _Contents:
    manifest = layout_on_disk.read_manifest(path)
    layout_on_disk.check_sizes(path, manifest)
    num_ranks, num_shards = manifest["world_size"], manifest["num_shards"]
    is_same_shard = _is_divided_alike(replicas, manifest)
    if _has_same_ranks(replicas, manifest):
        states = [_read_rank(path, manifest, rank) for rank in replicas.ranks]
    else:
        places = [replicas.place] if is_same_shard else range(num_shards)
        old_ranks = [range(place, num_ranks, num_shards) for place in places]
        means = [mean_state(_read_rank(path, manifest, rank) for rank in ranks) for ranks in old_ranks]
        states = [means[0] if is_same_shard else replicas.resharded(means)] * len(replicas.ranks)
    return _Contents(path, manifest, states)


def _is_divided_alike(replicas: Replicas, manifest: Mapping[str, Any]) -> bool:
    """Return whether the shards of the checkpoint are the shards that there are now."""
    if manifest["num_shards"] != replicas.num_shards:
        return False
    return replicas.num_shards == 1 or manifest.get("shard") == json.loads(json.dumps(replicas.describe()["shard"]))


def _has_same_ranks(replicas: Replicas, manifest: Mapping[str, Any]) -> bool:
    """Return whether every rank here continues as the rank of its number in the checkpoint."""
    return (
        manifest["world_size"] == replicas.world_size
        and manifest["group_size"] == replicas.group_size
        and _is_divided_alike(replicas, manifest)
    )


def _read_rank(path: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, Any]:
    state: dict[str, Any] = read_tensors(
        path / layout_on_disk.rank_file(rank), layout_on_disk.records(manifest)[rank].sha256
    )
    return state


# ---------------------------------------------------------------------- compatibility


def _check_fit(replicas: Replicas, contents: _Contents, parts: Mapping[str, Any]) -> None:
    here = replicas.describe()
    for section in ("module", "optimizers"):
        if found := first_difference([contents.manifest[section], here[section]]):
            raise CheckpointError(
                f"{found.key} is {found.first} in the checkpoint, but {found.other} here; construct the same model as "
                "when it was saved"
            )
    saved = contents.common["stateful"]
    for name in parts:
        if name not in saved:
            raise CheckpointError(
                f"it holds no state for {name!r}, only for {', '.join(map(repr, saved)) or 'no part at all'}; "
                + (f"call model.keep({name}=...) after gossip.load" if name in replicas.kept else "leave it out")
            )


def _changes(replicas: Replicas, manifest: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return in words what the run loses because of what has changed, and whether the messages in flight are kept."""
    if not _has_same_ranks(replicas, manifest):
        before, now = manifest["world_size"] // manifest["group_size"], replicas.world_size // replicas.group_size
        changes = [
            f"the replicas themselves: there were {before} and are now {now}, which all start from the mean of "
            "parameters, float buffers and optimizer state",
            "the states of the random number generators, and data and parts of all ranks but 0",
            "the messages in flight, and accumulated gradients",
        ]
        if not _is_divided_alike(replicas, manifest):
            num_shards = manifest["num_shards"]
            changes.append(
                f"the state of the algorithm: a replica was divided into {num_shards} shards, and is now divided into "
                f"{replicas.num_shards}{' others' * (num_shards == replicas.num_shards)}"
            )
        return changes, False
    changes, here = [], replicas.describe()
    if (before := manifest["num_processes"]) != replicas.num_processes:
        changes.append(
            f"the states of the random number generators, and data and parts of all ranks but 0: {replicas.world_size} "
            f"ranks were trained in {before} process{'es' * (before > 1)} and are now in {replicas.num_processes}"
        )
    for section in ("buckets", "topology", "compression", "algorithm"):
        if manifest.get(section, here[section]) != here[section]:  # older manifests do not name the algorithm
            are_others = f"the {section} differ{'s' * (section != 'buckets')}"
            return [*changes, f"the messages in flight: {are_others}"], False
    return changes, True


def _report(contents: _Contents, left_out: list[str], parts: Mapping[str, Stateful]) -> None:
    left_out = left_out + [
        f"the state of {name!r}: it was not requested" for name in contents.common["stateful"].keys() - parts
    ]
    if left_out:
        logger.warning(
            "step {} is restored from {}, but not: {}", contents.manifest["step"], contents.path, "; ".join(left_out)
        )
    else:
        logger.info("step {} is restored from {}", contents.manifest["step"], contents.path)
