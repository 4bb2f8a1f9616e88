"""Ranks that a real SLURM starts: slurmctld and slurmd on this machine, srun and sbatch as a user calls them."""

import csv
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lone_ranks
import pytest
from faulty_models import FAULTY
from free_ports import free_port
from repository import REPOSITORY
from running import MODELS, left_in, summary_of
from slurm_cluster import cluster, why_not

from gossip.lab.experiments.records import read_jsonl

TRAIN = (sys.executable, str(REPOSITORY / "scripts" / "train.py"))
TIMEOUT_S = 200
TINY = ("training.epochs=1", "training.batch_size=60", "figures=false", "launch.num_threads=1")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.xdist_group("slurm"),  # one cluster
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands that use the cluster."""
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "PYTHONPATH": f"{MODELS}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}


def run(slurm: dict[str, str], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=slurm, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def submit(slurm: dict[str, str], folder: Path, script: str, *options: str) -> str:
    """The number of a batch job."""
    (folder / "job.sh").write_text(script)
    submitted = run(slurm, folder, "sbatch", "--parsable", "--output=batch.out", *options, "job.sh")
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def wait_for_jobs(slurm: dict[str, str], folder: Path, *jobs: str) -> None:
    def have_ended() -> bool:
        waiting = run(slurm, folder, "squeue", "-h", "-t", "PENDING", "-o", "%i").stdout.split()
        for job in waiting:  # SLURM would have a requeued job wait for two minutes
            run(slurm, folder, "scontrol", "update", f"JobId={job}", "StartTime=now")
        states = [run(slurm, folder, "scontrol", "show", "job", job).stdout for job in jobs]
        assert not any("JobState=FAILED" in state for state in states), (folder / "batch.out").read_text()
        return all("JobState=COMPLETED" in state for state in states)

    deadline = time.monotonic() + TIMEOUT_S
    while not have_ended():
        assert time.monotonic() < deadline, (folder / "batch.out").read_text()
        time.sleep(0.2)


def test_srun_of_three_tasks_is_one_run_with_the_bits_of_three_workers(tmp_path: Path, slurm: dict[str, str]) -> None:
    srun = subprocess.Popen(
        ["srun", "-n", "3", *TRAIN, *TINY], cwd=tmp_path, env=slurm, stderr=subprocess.PIPE, text=True
    )
    # A batch script of one task has SLURM_NTASKS and SLURM_PROCID too, and starts its own workers.
    workers = shlex.join([*TRAIN, *TINY, "launch.world_size=3", "hydra.run.dir=workers"])
    wait_for_jobs(slurm, tmp_path, submit(slurm, tmp_path, f"#!/bin/bash\n{workers}\n", "--ntasks=1"))
    _, errors = srun.communicate(timeout=TIMEOUT_S)
    assert srun.returncode == 0, errors
    (folder,) = (tmp_path / "outputs").iterdir()
    found = left_in(folder, ("loss",))
    assert found == left_in(tmp_path / "workers", ("loss",))
    assert found["summary"]["world_size"] == 3
    assert errors.count("run folder: ") == 1


MEETING_SCRIPT = """
import os, time, pathlib
import torch, torch.distributed as dist
from gossip import launch

def meet():
    step = os.environ["SLURM_STEP_ID"]
    pathlib.Path(f"here{step}").touch()
    deadline = time.monotonic() + 100
    while len(list(pathlib.Path().glob("here*"))) < 2:  # both steps are in their groups at the same time
        assert time.monotonic() < deadline, "the other step did not come"
        time.sleep(0.05)
    steps = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([float(step)]))
    places = os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"]
    return step, [int(each) for each in steps], places

if __name__ == "__main__":
    assert "MASTER_ADDR" not in os.environ
    (first,) = launch(meet, world_size=2)
    (second,) = launch(meet, world_size=2)
    assert first == second, (first, second)
    assert "RANK" not in os.environ
    os.write(1, f"{first}\\n".encode())  # one write: lines must not mingle
"""


def test_two_steps_at_once_do_not_meet(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "meet.py").write_text(MEETING_SCRIPT)
    step = f"srun --exact -n 2 {sys.executable} meet.py"
    salloc = run(
        slurm, tmp_path, "salloc", "-n", "4", "bash", "-c", f"{step} & first=$!; {step} & wait $first && wait $!"
    )
    assert salloc.returncode == 0, salloc.stderr
    assert sorted(salloc.stdout.splitlines()) == [
        str((str(step), [step, step], (str(rank), str(rank), "2", "localhost")))
        for step in range(2)
        for rank in range(2)
    ]


def test_killing_one_task_ends_all_and_names_it(tmp_path: Path, slurm: dict[str, str]) -> None:
    killed = 0  # the one that keeps the key-value store
    faulty = (*FAULTY, f"+model.rank={killed}", "+model.how=killed")
    srun = run(slurm, tmp_path, "srun", "-n", "3", *TRAIN, *TINY, *faulty)
    assert srun.returncode == 128 + 9
    assert f"task {killed}: Killed" in srun.stderr
    failures = [line for line in srun.stderr.splitlines() if line.startswith("rank ") and " failed: " in line]
    assert {line.partition(" failed: ")[0] for line in failures} == {"rank 1", "rank 2"}
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert f"rank {killed}" in summary["reason"].partition("failed: ")[2]


def test_requeued_job_goes_on_in_the_first_attempts_folder(tmp_path: Path, slurm: dict[str, str]) -> None:
    once = ("+model.how=killed", f"+model.once={tmp_path}/killed", "checkpoint.every=2")
    again = '[ -z "$SLURM_RESTART_COUNT" ] && scontrol requeue $SLURM_JOB_ID && sleep infinity'
    script = f"#!/bin/bash\nsrun {shlex.join([*TRAIN, *TINY, *FAULTY, *once])} || {{ {again}; }}\n"
    wait_for_jobs(slurm, tmp_path, submit(slurm, tmp_path, script, "--requeue", "--ntasks=2", "--open-mode=append"))
    assert "step 2 is restored from" in (tmp_path / "batch.out").read_text()
    (folder,) = (tmp_path / "outputs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("completed", 2)
    assert [record["step"] for record in read_jsonl(folder / "rank1.jsonl")] == list(range(summary["steps"]))


def test_the_batch_script_of_the_page_about_several_nodes(tmp_path: Path, slurm: dict[str, str]) -> None:
    page = (REPOSITORY / "docs" / "several_nodes.md").read_text()
    (script,) = re.findall(r"^  ```bash\n(.*?)^  ```", page, re.MULTILINE | re.DOTALL)
    script = re.sub("^  ", "", script, flags=re.MULTILINE).replace("--ntasks=8", "--ntasks=2")
    script = script.replace("python scripts/train.py", shlex.join(TRAIN))
    script = script.replace("training.epochs=1000 checkpoint.every=1000", f"{' '.join(TINY)} checkpoint.every=10")
    wait_for_jobs(slurm, tmp_path, submit(slurm, tmp_path, script))
    (summary,) = tmp_path.glob("outputs/*/summary.json")
    assert json.loads(summary.read_text())["world_size"] == 2


def blocks_of(page: str) -> list[str]:
    """The batch scripts of a page."""
    return re.findall(r"^```bash\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def train_alone(folder: Path) -> str:
    """The command of a rank that trains until there are three, and one of them has come later."""
    path = lone_ranks.script(folder, "train.py", "gossip.launch(train)")
    return shlex.join([sys.executable, str(path), "members[-1] == 3 == len(members)", "$SLURM_JOB_ID.$SLURM_STEP_ID"])


def test_a_step_that_is_killed_is_started_anew_while_the_others_train(tmp_path: Path, slurm: dict[str, str]) -> None:
    script, _ = blocks_of("gossip_store.md")
    for ours, here in {
        "--nodes=4 --ntasks-per-node=1": "--nodes=1 --ntasks=3",
        "$(hostname):29400": f"localhost:{(port := free_port())}",
        "$SLURM_NNODES": "3",
        "gossip store": f"{sys.executable} -m gossip store --port {port}",
        '$(scontrol show hostnames "$SLURM_JOB_NODELIST")': "localhost localhost localhost",
        "python train.py": train_alone(tmp_path),
    }.items():
        assert ours in script
        script = script.replace(ours, here)
    job = submit(slurm, tmp_path, script)
    lone_ranks.wait_until(lambda: lone_ranks.trained_by(tmp_path, 0, 1, 2))
    killed = lone_ranks.read(tmp_path / "member1")["agent"]
    assert run(slurm, tmp_path, "scancel", "--signal=KILL", killed).returncode == 0
    wait_for_jobs(slurm, tmp_path, job)
    assert lone_ranks.result_of(tmp_path) == {rank: [0, 2, 3] for rank in (0, 2, 3)}
    assert lone_ranks.read(tmp_path / "member3")["agent"] == f"{job}.3"  # the fourth step


@pytest.mark.slow
def test_one_of_several_jobs_is_requeued_while_the_others_train(tmp_path: Path, slurm: dict[str, str]) -> None:
    _, script = blocks_of("gossip_store.md")
    script = script.replace("python train.py", train_alone(tmp_path))
    with lone_ranks.served() as (address, _):
        environment = slurm | {"GOSSIP_STORE": address, "GOSSIP_GROUPS": "3"}
        jobs = [submit(environment, tmp_path, script) for _ in range(3)]
        lone_ranks.wait_until(lambda: lone_ranks.trained_by(tmp_path, 0, 1, 2))
        job, _, _ = lone_ranks.read(tmp_path / "member1")["agent"].partition(".")
        assert run(slurm, tmp_path, "scontrol", "requeue", job).returncode == 0
        wait_for_jobs(slurm, tmp_path, *jobs)
    assert lone_ranks.result_of(tmp_path) == {rank: [0, 2, 3] for rank in (0, 2, 3)}
    assert lone_ranks.read(tmp_path / "member3")["agent"] == f"{job}.0"


def test_a_sweep_is_an_array_of_jobs(tmp_path: Path, slurm: dict[str, str]) -> None:
    sweep = (sys.executable, str(REPOSITORY / "scripts" / "sweep.py"), "hydra/launcher=submitit_slurm")
    done = run(slurm, tmp_path, *sweep, "topology=ring", "launch.world_size=2", "data.partition.scheme=iid", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tmp_path.glob("outputs/sweeps/*/results.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3, "the ring, all-reduce and no communication"
    assert {row["status"] for row in rows} == {"completed"}
    (_,) = {path.name.partition("_")[0] for path in tmp_path.glob("outputs/sweeps/*/.submitit/[0-9]*_*")}  # one array
