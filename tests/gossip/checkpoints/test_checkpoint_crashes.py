"""Killed, out of space, damaged, hostile: what was saved before is what is loaded."""

import hashlib
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import assert_same, everything, log_of, make_model, names_in, one_step, undisturbed
from ranks import on_ranks, run_ranks
from replicas import SGD
from torch import nn

import gossip
from gossip import CheckpointError, launch
from gossip.checkpoints import checkpoint_folder as layout
from gossip.checkpoints import saving
from gossip.checkpoints.rank_replica import RankReplica
from topologies import Round, Topology


def saved_at(folder: Path | str, *steps: int, **options: Any) -> gossip.GossipDataParallel:
    model = make_model(**options)
    for step in range(max(steps) + 1):
        if step in steps:
            gossip.save(model, folder, keep=10, at=step)
        one_step(model)
    return model


# ---------------------------------------------------------------------- killed


def save_and_be_killed(folder: str, rank: int, function: str, call: int, background: bool) -> None:
    model = saved_at(folder, 1, 2)  # at step 3 now
    original, num_calls = getattr(os, function), 0

    def kill(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    if model.rank == rank:
        setattr(os, function, kill)
    gossip.save(model, folder, keep=1, background=background)
    model.close()


def load_and_save(folder: str, step: int) -> None:
    model = make_model(seed=1)
    assert gossip.load(model, folder).step == step
    for _ in range(3):
        one_step(model)
    gossip.save(model, folder, keep=2)
    assert gossip.load(model, folder).step == step + 3


@pytest.mark.parametrize(
    ("rank", "function", "call", "survives", "background"),
    [
        (1, "write", 3, 2, False),  # in the middle of its file
        (1, "fsync", 1, 2, False),  # before its file is on the disk
        (0, "replace", 1, 2, False),  # before the checkpoint has its name
        (0, "fsync", 5, 3, False),  # after it
        (0, "unlink", 2, 3, False),  # while an old one is removed
        (1, "write", 3, 2, True),
        (1, "replace", 1, 2, True),  # before it says that its file is complete
        (0, "replace", 2, 2, True),
    ],
)
def test_killed_while_saving(
    rank: int, function: str, call: int, survives: int, background: bool, tmp_path: Path
) -> None:
    with pytest.raises(gossip.LaunchError, match=f"rank {rank} failed: .*SIGKILL"):
        launch(save_and_be_killed, str(tmp_path), rank, function, call, background, world_size=2)
    if rank == 0 and (function, call) != ("fsync", 5):
        assert any(name.endswith(".partial") for name in names_in(tmp_path))
    run_ranks(load_and_save, str(tmp_path), survives, world_size=2)
    names = names_in(tmp_path)
    assert f"step_{survives + 3:010d}" in names
    assert len(names) == 2  # no leftovers
    assert all(name.startswith("step_") for name in names)


def test_killed_between_two_renames_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_at(str(tmp_path), 1, 2)
    gossip.load(model, tmp_path / "step_0000000002")
    replace, num_calls = os.replace, 0

    class Killed(BaseException):
        pass

    def interrupt(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise Killed
        replace(*args)

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(Killed):
        gossip.save(model, tmp_path, at="again")
    monkeypatch.setattr(os, "replace", replace)
    assert names_in(tmp_path) == [".step_0000000002.partial", "step_0000000001", "step_0000000002.replaced"]
    assert gossip.load(model, tmp_path).data == {"at": 2}
    gossip.save(model, tmp_path, at="once more")
    assert names_in(tmp_path) == ["step_0000000001", "step_0000000002"]
    assert gossip.load(model, tmp_path).data == {"at": "once more"}


# ---------------------------------------------------------------------- a disk that takes no more


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_file_that_may_not_grow_is_an_error_on_all_ranks_and_training_goes_on(background: bool, tmp_path: Path) -> None:
    where = r"the checkpoint of step 3, saved in the background, is not complete: " if background else "saving step 3: "
    reason = where + r"(.*rank 1: |rank 1: )?File too large \(errno 27\): .*\.step_0000000003\.partial/rank1\.pt"
    wanted = undisturbed(5)

    model = saved_at(tmp_path, 1)
    one_step(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if model.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    if background:
        gossip.save(model, tmp_path, background=True)  # the next call says that it has failed
    with pytest.raises(CheckpointError, match=reason):
        gossip.save(model, tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    if model.rank == 0:
        assert names_in(tmp_path) == ["step_0000000001"]
    one_step(model)
    gossip.save(model, tmp_path)
    one_step(model)
    assert_same(everything(model), wanted)
    resumed = make_model(seed=1)
    assert gossip.load(resumed, tmp_path / "step_0000000001").step == 1
    assert gossip.load(resumed, tmp_path).step == 4
    one_step(resumed)
    assert_same(everything(resumed), wanted)


def test_copies_for_which_there_is_no_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_at(str(tmp_path), 1)
    monkeypatch.setattr(saving, "available_bytes", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"but 0.001 MB are available; save with background=False"):
        gossip.save(model, tmp_path, background=True)
    one_step(model)
    gossip.save(model, tmp_path)
    assert gossip.load(model, tmp_path).step == 3
    assert names_in(tmp_path) == ["step_0000000001", "step_0000000003"]


def test_a_save_that_is_repeated_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the remaining ranks repeat one during which a rank was lost."""

    def twice(model: Any, operation: Callable[[Any], Path]) -> Path:
        operation(RankReplica(model))
        return operation(RankReplica(model))

    threads: list[threading.Thread] = []
    read_note = layout.read_note

    def without_the_first(*args: Any) -> Any:
        """As if a lost rank had left the first attempt without its note."""
        threads.append(threading.current_thread())
        return None if threads[-1] is threads[0] else read_note(*args)

    model = saved_at(str(tmp_path), 1)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "collectively", twice)
        patch.setattr(layout, "read_note", without_the_first)
        gossip.save(model, tmp_path, background=True)
        model._kept.wait_for_save()
    assert gossip.load(model, tmp_path).step == 2


@on_ranks(2)
def test_save_refuses_what_ranks_do_not_share(tmp_path: Path) -> None:
    model = saved_at(tmp_path, 0)
    where = f"{tmp_path}/file"
    if model.rank == 0:
        Path(where).touch()
    with pytest.raises(CheckpointError, match=r"preparing to save.*: rank 0: .*exists.* \(errno 17\): .*/file"):
        gossip.save(model, where)
    if model.rank == 0:
        (tmp_path / "step_0000000001").mkdir()
        (Path(tmp_path) / "step_0000000001" / "precious.txt").touch()
    with pytest.raises(
        CheckpointError, match="step_0000000001 exists and holds files that do not belong to a checkpoint; move it"
    ):
        gossip.save(model, tmp_path)
    with pytest.raises(gossip.ManifestError, match=r"comparing what is saved: parts is .* on rank 0, but .*'b"):
        gossip.save(model, f"{tmp_path}/x", **({"a": 1} if model.rank == 0 else {"b": 1}))
    with pytest.raises(gossip.ManifestError, match=r"folder is .*/x0 on rank 0, but .*/x1 on rank 1"):
        gossip.save(model, f"{tmp_path}/x{model.rank}")
    with pytest.raises(TypeError if model.rank == 1 else CheckpointError, match=r"part is a builtins.object"):
        gossip.save(model, f"{tmp_path}/x", part=object() if model.rank == 1 else 1)
    buffer = model.module.level
    if model.rank == 1:
        model.module.level = torch.zeros(6, dtype=torch.bfloat16)
    for function in (gossip.save, gossip.export):
        with pytest.raises(gossip.ManifestError, match=r"level.*bfloat16 \[5\].* on rank 0, but bfloat16 \[6\]"):
            function(model, f"{tmp_path}/x")
    model.module.level = buffer
    assert not os.path.exists(f"{tmp_path}/x")
    if model.rank == 0:
        with layout.locked(tmp_path):
            torch.distributed.barrier()
            torch.distributed.barrier()
    else:
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match="another run is currently saving into"), layout.locked(tmp_path):
            pass
        torch.distributed.barrier()
    one_step(model)
    gossip.save(model, tmp_path)  # the ranks are still in step


def save_at_different_steps(folder: str, topology: Topology, reason: str) -> None:
    model = make_model(topology=topology, timeout=timedelta(seconds=2))
    for _ in range(2 + model.rank):
        one_step(model)
    with pytest.raises(gossip.GossipError, match=reason.format(step=2 + model.rank)):
        gossip.save(model, folder)
    assert not os.path.exists(f"{folder}/step_0000000002")


def test_ranks_at_different_steps_are_refused_by_name(tmp_path: Path) -> None:
    pair, alone = Round.from_groups(2, [(0, 1)]), Round.from_groups(2, [(0,), (1,)])
    quiet = Topology.from_rounds([pair, alone, alone])
    reason = "step is 2 on rank 0, but 3 on rank 1; call gossip.save on every rank after the same number of steps"
    run_ranks(save_at_different_steps, str(tmp_path), quiet, reason, world_size=2)
    # A rank that waits for a message that is not coming hears of nothing else: the time-out says where it was, and, if
    # the other one has given up before, where that one was.
    reason = "gossip.save at step {step}: (?=.*every rank must call it).*not all of the 2 ranks took part within 2 s"
    run_ranks(save_at_different_steps, str(tmp_path), Topology.from_rounds([pair]), reason, world_size=2)


# ---------------------------------------------------------------------- what is not a checkpoint of ours


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def reseal(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None) -> None:
    """Let the manifest agree with the folder again, as somebody with evil intentions would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    change(manifest)
    manifest.pop("manifest_sha256")
    manifest["manifest_sha256"] = layout.digest_of(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['MARK']}",)


def hostile(checkpoint: Path) -> None:
    torch.save({"parameters": Hostile()}, checkpoint / "rank0.pt")
    reseal(checkpoint)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda c: os.truncate(c / "rank0.pt", 1000), r"rank0\.pt has 1000 bytes instead of \d+"),
    "flipped": (lambda c: flip(c / "rank0.pt"), r"rank0\.pt is not what was written: its SHA-256 differs"),
    "missing file": (lambda c: (c / "rank0.pt").unlink(), r"rank0\.pt cannot be read: No such file"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), "is not a complete checkpoint: it has no manifest"),
    "truncated manifest": (lambda c: os.truncate(c / "manifest.json", 99), r"manifest\.json is damaged: "),
    "flipped manifest": (
        lambda c: (c / "manifest.json").write_text((c / "manifest.json").read_text().replace("float32", "float33")),
        r"manifest\.json is damaged: its hash does not match its contents",
    ),
    "foreign manifest": (
        lambda c: (c / "manifest.json").write_text("[1]"),
        "is not the manifest of a gossip checkpoint",
    ),
    "other version": (
        lambda c: reseal(c, lambda manifest: manifest.update(format_version=1)),
        "has format version 1, but this gossip reads 2; load it with gossip 0",
    ),
    "hostile": (hostile, r"rank0\.pt holds something other than tensors.*: unsupported GLOBAL posix.system"),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    saved_at(str(folder), 1, 2).close()
    return folder


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_checkpoint_is_an_error_or_an_older_one_is_taken(
    damage: str, two_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(tmp_path / "executed"))
    folder = tmp_path / "two"
    shutil.copytree(two_checkpoints, folder)
    spoil, reason = DAMAGES[damage]
    spoil(folder / "step_0000000002")
    model = make_model(seed=1)
    before = everything(model)
    with pytest.raises(CheckpointError, match=reason) as caught:
        gossip.load(model, folder / "step_0000000002")
    assert "\n" not in str(caught.value)
    assert_same(everything(model), before)
    with log_of() as lines:
        assert gossip.load(model, folder).data == {"at": 1}
    assert len(lines) == 1
    assert lines[0].startswith("checkpoint step_0000000002 is skipped: ")
    one_step(model)
    assert model.step == 2
    gossip.save(model, folder)
    assert gossip.load(model, folder).step == 2
    assert not (tmp_path / "executed").exists()


def test_load_says_what_is_not_there(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(CheckpointError, match="nowhere cannot be read: No such file or directory"):
        gossip.load(model, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="step_0000000009 does not exist"):
        gossip.load(model, tmp_path / "step_0000000009")
    with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*: there is none in it"):
        gossip.load(model, tmp_path)
    gossip.save(model, tmp_path)
    (tmp_path / "step_0000000000").rename(tmp_path / "step_0000000007")
    with pytest.raises(CheckpointError, match=r"no valid checkpoint in .*: .*was renamed: it was saved at step 0"):
        gossip.load(model, tmp_path)
    (tmp_path / "step_0000000007").rename(tmp_path / "best")
    assert gossip.load(model, tmp_path / "best").step == 0


def test_only_checkpoints_beyond_keep_are_removed(tmp_path: Path) -> None:
    foreign = ["step_0000000000.txt", "step_1", ".step_0000000001.partial.txt", "model.pt"]
    for name in foreign:
        (tmp_path / name).mkdir()
    model = saved_at(str(tmp_path), 0, 1, 2, 3)  # at step 4
    (tmp_path / "step_0000000000" / "notes.txt").touch()
    os.truncate(tmp_path / "step_0000000003" / "rank0.pt", 10)
    (tmp_path / ".step_0000000099.partial").mkdir()
    (tmp_path / ".step_0000000099.partial" / "rank7.pt").touch()
    (tmp_path / ".step_0000000098.partial").mkdir()
    (tmp_path / ".step_0000000098.partial" / "mine.txt").touch()
    gossip.save(model, tmp_path, keep=2)
    left = {*foreign, ".step_0000000098.partial", *(f"step_{step:010d}" for step in (0, 2, 3, 4))}
    assert set(names_in(tmp_path)) == left  # 3 is damaged, and does not count; 0 has been made somebody's own
    assert names_in(tmp_path / "step_0000000000") == ["manifest.json", "notes.txt", "rank0.pt"]
    assert gossip.load(model, tmp_path / "step_0000000002").step == 2
    with log_of() as lines:
        gossip.save(model, tmp_path, keep=1)
    said = "holds checkpoints of later steps, perhaps of another run: load prefers step_0000000004 to step 2"
    assert said in lines[0]
    assert set(names_in(tmp_path)) == left


# ---------------------------------------------------------------------- ranks that see different things


@on_ranks(3)
def test_ranks_agree_on_the_newest_that_is_valid_for_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = saved_at(folder, 1, 2, 3, topology="ring", optimizer=SGD)
    rank = model.rank
    if rank == 0:
        flip(folder / "step_0000000003" / "rank1.pt")
    torch.distributed.barrier()
    with log_of() as lines:
        assert gossip.load(model, folder).step == 2
    reason = "rank 1: .*rank1.pt is not what was written"
    assert len(lines) == (rank == 0)
    if rank == 0:
        assert "step_0000000003" in lines[0]
        assert "rank 1: " in lines[0]
    with pytest.raises(CheckpointError, match=reason):
        gossip.load(model, folder / "step_0000000003")

    # A rank whose view of the folder lags behind: it does not see the newest, nor the one after.
    mine = Path(f"{folder}-{rank}")
    shutil.copytree(folder, mine)
    shutil.rmtree(mine / "step_0000000003")
    if rank == 2:
        shutil.rmtree(mine / "step_0000000002")
    with log_of() as lines:
        checkpoint = gossip.load(model, mine)
    assert (checkpoint.step, checkpoint.path) == (1, mine / "step_0000000001")
    assert [line for line in lines if "does not exist" not in line] == []
    with pytest.raises(CheckpointError, match=r"rank 2: .*-2/step_0000000002 does not exist"):
        gossip.load(model, mine / "step_0000000002")

    # Disks of their own, with other runs on them.
    if rank == 1:
        reseal(mine / "step_0000000001", lambda manifest: manifest.update(torch="another"))
    with pytest.raises(CheckpointError, match="the ranks see different checkpoints under"):
        gossip.load(model, mine / "step_0000000001")
    assert gossip.load(model, folder).step == 2
    one_step(model)


@on_ranks(2)
def test_part_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, _: Any) -> None:
            if torch.distributed.get_rank() == 1:
                raise KeyError("missing")

    model = make_model(module=lambda: nn.Linear(4, 2))
    gossip.save(model, tmp_path, part=Part())
    with pytest.raises(CheckpointError, match=r"the model is partly loaded.*: rank 1: KeyError: 'missing'"):
        gossip.load(model, tmp_path, part=Part())
    gossip.load(model, tmp_path)
    one_step(model)
