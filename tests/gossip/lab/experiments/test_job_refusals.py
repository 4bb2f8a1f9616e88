"""What a user got wrong is one line and exit status 2, before any worker starts."""

import os
import socket
from pathlib import Path

import pytest
from composing import CommandLine, composed

from gossip.lab.experiments.run_folder import claim, lock, write_json

REFUSED = {
    "topology=rign": "there is no topology=rign; did you mean ring? Available: ",
    "imports=[no_such_module]": "imports=no_such_module cannot be imported: No module named",
    "data=stdlib_text": (
        "MLP cannot take the inputs of stdlib_text (torch.int64, [128] a sample): mat1 and mat2 must have the same"
        " dtype, but got Long and Float; model=char_transformer takes text"
    ),
    "data=my_module": (
        "there is no data=my_module. Available: digits, stdlib_text, text_files; data=my_module:function "
        "for a function of your own that returns the data"
    ),
    "output_root=/proc/nowhere": "/proc/nowhere: No such file or directory; output_root=...",
    "method=gosip": "there is no method=gosip; did you mean gossip? Available: gossip, ddp, local",
    "topology=hypercube launch.world_size=3": "launch.world_size=3: topology 'hypercube' needs a world_size that is a",
    "launch.device=gpu": "there is no launch.device=gpu; did you mean cpu?",
    "data=text_files data.folder=none hydra.run.dir=a/b/c": "data.folder=none: text files: ",
    "training.batch_size=1000": "rank 1 has only 359 samples, less than one batch",
    "model._target_=nowhere.Model": "model._target_=nowhere.Model is not among the targets that a ",
    "trusted_targets=torch": "trusted_targets='torch' is no list of packages; write trusted_targets=[",
    "model._target_=null": "model has no _target_",
    "~topology": "the configuration has no key topology.name; set topology.name=...",
    "topology.every=2.5": "topology.every must be a valid integer, got 2.5",
    "topology.order=[0,2,1]": "topology.order=[0,2,1]: order must name every rank from 0 to",
    "launch.local_size=3": "launch.local_size=3 does not divide launch.world_size=4; every group",
    "shard=fsdp": "shard=fsdp divides a replica among the ranks of a group; set launch.local_size",
    "topology=hypercube launch.world_size=6 launch.local_size=2": (
        "launch.world_size=6 launch.local_size=2: topology 'hypercube'"
    ),
    "launch.restart=2": "launch.restart=2: a worker that is started again joins others that go on; set",
    "launch.local_size=2 engine=virtual": "launch.local_size=2: engine=virtual has no groups of ranks",
    "launch.local_size=2 method=ddp": "launch.local_size=2: method=ddp has no groups of ranks",
    "data.on_loss=forget": "there is no data.on_loss=forget",
    "method=ddp checkpoint.every=5": "checkpoint.every=5: method=ddp cannot save and resume; set",
    "resume=nowhere": "resume=nowhere: there is no run in it (config.yaml); name the folder of a run",
    "algorithm=push_sum compression=choco topology=ring": (
        "compression choco(top_k, ratio=0.0625, gamma=0.15625) cannot serve algorithm PushSum, which must "
    ),
    "wrapper.transport=distributd": (
        "wrapper.transport=distributd: unknown transport 'distributd'. Did you mean 'distributed'? "
    ),
    "wrapper.clip=bucket wrapper.clip_grad_norm=1 wrapper.step_in_backward=false": (
        "wrapper.clip=bucket clips inside the backward pass, not with wrapper.step_in_backward=false; set"
    ),
    "wrapper.transport=debug engine=virtual": "wrapper.transport=debug is for ranks that are processes",
    "training.total_batch_size=66": "training.total_batch_size=66 is no multiple of launch.world_size=4",
    "+wrapper.compression=int8": "wrapper.compression is not set here; set compression=...",
    "+wrapper.scaler=null": "wrapper.scaler is for programs of your own; leave it out",
    "optimizer.lr=abc": "optimizer.lr must be a valid number, got 'abc'",
    "optimizer.lr=-0.1": "optimizer.lr=-0.1, optimizer.momentum=0.9, ",
    "+optimizer.lrr=1": "optimizer.lrr=1: SGD has no option lrr; did you mean lr?",
    "model.hidden=[64": "model.hidden=[64 cannot be read as option=value; quote lists and texts, as in 'key=[1,2]' (",
    "data.partition.scheme=dirichlet data.partition.alpha=abc": (
        "data.partition.alpha must be a valid number, got 'abc'"
    ),
    "compression=int8 compression.bits=9": "compression.bits=9: bits must be 4 or 8, got 9",
    "topology.degree=3": "the configuration has no key topology.degree; did you mean topology.options.degree?",
    "topology=random_regular topology.options.degree=abc": (
        "topology.options.degree=abc: degree must be an integer of at least 1"
    ),
    "topology=null": "every argument is option=value, and a config group takes the name of one of its files",
    "topology=ring,torus": "topology=ring,torus are several values: add -m for a run of each",
    "topology.options.k=1": "the configuration has no key topology.options.k; it is an option of topology=base, ",
    "zzzz=1": "the configuration has no key zzzz; --help shows those that there are",
    "training.epochs": "training.epochs has no value; write training.epochs=...",
    "imports=abc": "imports=abc is no list of modules; write imports=[module]",
    "output_root=": "output_root= names no folder; write output_root=.",
    "--multirn": "there is no flag --multirn; did you mean --multirun? Options are written without dashes",
    "--multirun=5": "--multirun=5: --multirun takes no value",
    "optimizer.lr=${nothing}": "optimizer.lr cannot be resolved: Interpolation key 'nothing' not found",
}
"""Options, and how the refusal begins."""


@pytest.mark.parametrize(("options", "line"), REFUSED.items(), ids=REFUSED)
def test_refusals_are_one_line(command: CommandLine, options: str, line: str, tmp_path: Path) -> None:
    status, stderr = command(*options.split())
    assert status == 2
    assert stderr.startswith(f"error: {line}")
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_refusals_of_the_folder_of_another_sweep(command: CommandLine, tmp_path: Path) -> None:
    taken = tmp_path / "taken" / "0"
    taken.mkdir(parents=True)
    (taken / "config.yaml").write_text("of another run")
    with pytest.raises(SystemExit, match=r"^2$"):
        command("-m", "seed=0,1", "hydra.sweep.dir=taken")
    assert [path.name for path in taken.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: the run in {run} has left no checkpoint in checkpoints/ to go on from; begin it anew, with"),
        (["hydra.run.dir=other"], "error: resume=run goes on in that folder; leave out hydra.run.dir="),
        (["seed=5", "topology=ring", "optimizer.lr=0.1", "launch.world_size=2"], "error: the run in {run} has left no"),
        (
            ["topology=path", "seed=0", "optimizer=sgd"],
            "error: resume=run goes on as that run was configured, but seed is 5 there and 0 here, topology.name is "
            '"ring" there and "path" here; leave that out, or begin another run\n',
        ),
        (["experiment=digits_cnn"], "error: resume=run goes on as that run was configured, but model._target_ is "),
        (["~training.epochs"], "error: resume=run goes on as that run was configured, but training.epochs is 20 there"),
    ],
)
def test_refusals_to_resume(command: CommandLine, tmp_path: Path, arguments: list[str], line: str) -> None:
    folder = tmp_path / "run"
    claim(folder, composed("topology=ring", "seed=5"))
    content = {path: path.read_bytes() for path in folder.iterdir()}
    status, stderr = command("resume=run", *arguments)
    assert status == 2
    assert stderr.startswith(line.format(run=folder))
    assert stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == content
    assert not (tmp_path / "outputs").exists()


def test_refusals_to_resume_what_has_ended_or_is_in_use(command: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    claim(folder, composed())
    with lock(folder):
        status, stderr = command("resume=run")
    assert (status, stderr.count("\n")) == (2, 1)
    owner = f"process id {os.getpid()} on {socket.gethostname()}, started at 20"
    assert stderr.startswith(f"error: {folder} is in use by the run with {owner}")
    write_json(folder / "summary.json", {"status": "completed"})
    status, stderr = command("resume=run")
    assert status == 2
    assert stderr == f"error: the run in {folder} has ended (summary.json): there is nothing to resume\n"


def test_refusals_to_resume_in_a_sweep(command: CommandLine, tmp_path: Path) -> None:
    claim(tmp_path / "run", composed())
    with pytest.raises(SystemExit, match=r"^1$"):
        command("-m", "resume=run", "hydra.sweep.dir=sweep")
    assert "goes on with one run; leave out -m" in (tmp_path / "sweep" / "sweep.csv").read_text()


def test_refusals_leave_folders_that_were_there(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "earlier").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for folder in ([], ["hydra.run.dir=empty/run"], ["hydra.run.dir=empty"]):
        assert command("seed=x", *folder)[0] == 2
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["empty", "outputs", "outputs/earlier"]
