"""Which run a process that was started again goes on with."""

import os
from pathlib import Path

from composing import composed

from gossip.lab.experiments.resuming import State, find, identities, restarter, state_of
from gossip.lab.experiments.run_folder import STARTED_BY_FILE, claim, update_config, write_failure, write_json

FIRST = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c"}
REQUEUED = {**FIRST, "SLURM_RESTART_COUNT": "1"}


def begun(
    root: Path, name: str, *overrides: str, by: dict[str, str] | None = None, has_checkpoint: bool = True
) -> Path:
    """The folder of a run that was begun later than all others."""
    folder = root / name
    claim(folder, composed(*overrides))
    if by is not None:
        write_json(folder / STARTED_BY_FILE, identities(by))
    if has_checkpoint:
        (folder / "checkpoints" / "step_0000000005").mkdir(parents=True)
    later = 1_000_000_000 + len(list(root.iterdir()))
    os.utime(folder / "versions.json", (later, later))
    return folder


def test_restarter_is_who_counts_restarts() -> None:
    assert restarter({}) is None
    assert restarter({"TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert restarter({"TORCHELASTIC_RESTART_COUNT": "2"}) == "torchrun"
    assert restarter(REQUEUED | {"TORCHELASTIC_RESTART_COUNT": "0"}) == "SLURM"


def test_identities_are_those_of_all_attempts() -> None:
    assert identities({}) == {}
    assert identities(FIRST) == identities(REQUEUED) == {"SLURM": "c 7"}
    assert identities({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "1"}) == {"torchrun": "mine"}
    nameless = identities({"TORCHELASTIC_RUN_ID": "none"})  # the same for everybody who gives no id
    assert str(os.getppid()) in nameless["torchrun"]


def test_find_takes_the_newest_run_of_this_configuration(tmp_path: Path) -> None:
    begun(tmp_path, "older", "seed=1")
    newest = begun(tmp_path, "newer", "seed=1", "launch.world_size=2", "checkpoint.every=5")
    begun(tmp_path, "another", "seed=2")
    begun(tmp_path, "without", "seed=1", has_checkpoint=False)  # nothing to go on from, and nothing to be taken away
    asked = composed("seed=1", "resume=auto", "checkpoint.every=7", f"output_root={tmp_path}")
    assert find(tmp_path, asked, {}) == newest
    write_json(newest / "summary.json", {"status": "completed"})
    assert find(tmp_path, asked, {}) == newest
    update_config(newest, composed("seed=3"))
    assert find(tmp_path, asked, {}) == tmp_path / "older"
    assert find(tmp_path, composed("seed=4"), {}) is None
    assert find(tmp_path / "nothing", asked, {}) is None


def test_find_of_a_requeued_job_takes_none_but_its_own_run(tmp_path: Path) -> None:
    own = begun(tmp_path, "own", by=FIRST, has_checkpoint=False)
    begun(tmp_path, "of_another_job", by={**FIRST, "SLURM_JOB_ID": "8"})
    by_hand = begun(tmp_path, "by_hand")
    (tmp_path / "damaged").mkdir()
    for name in ("started_by.json", "versions.json", "config.yaml"):
        (tmp_path / "damaged" / name).write_text("[")
    assert find(tmp_path, composed(), REQUEUED) == own
    assert find(tmp_path, composed("seed=1"), REQUEUED) is None
    assert find(tmp_path, composed(), {**REQUEUED, "SLURM_JOB_ID": "9"}) is None
    assert find(tmp_path, composed("resume=auto"), REQUEUED) == own
    assert find(tmp_path, composed("resume=auto"), {**REQUEUED, "SLURM_JOB_ID": "9"}) == by_hand


def test_state_of_a_folder(tmp_path: Path) -> None:
    assert state_of(tmp_path / "run") is State.BEGIN
    folder = begun(tmp_path, "run", by=FIRST, has_checkpoint=False)
    write_failure(folder, {"status": "failed"})
    assert state_of(folder) is state_of(folder, None, REQUEUED) is State.BEGIN_AGAIN
    (folder / "checkpoints" / ".step_0000000005.partial").mkdir(parents=True)
    assert state_of(folder) is State.BEGIN_AGAIN
    (folder / "checkpoints" / "step_0000000005").mkdir()
    assert state_of(folder) is state_of(folder, None, REQUEUED) is State.GO_ON
    other = {**REQUEUED, "SLURM_JOB_ID": "8"}
    assert state_of(folder, None, other) is State.BEGIN  # which is then refused: it is taken
    assert state_of(folder, "auto", other) is State.GO_ON
    write_json(folder / "summary.json", {"status": "completed"})
    assert state_of(folder) is State.ENDED
