"""The SLURM step of which this process is a task, as described by the environment that ``srun`` sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_PORT, NUM_PORTS = 15000, 15000
"""The range of ports for stores, below those that Linux gives to outgoing connections (32768 and above)."""

_STRIDE = 7919  # coprime to NUM_PORTS: consecutive jobs, and the steps of one job, get different ports


@dataclass(frozen=True)
class Step:
    """A step with several tasks, each of which is a rank, and this process's place in it."""

    job: int  # its id, which a job that is requeued keeps; its steps are counted from 0 again
    step: int
    restarts: int  # how often the job has been requeued
    task: int  # the number of this task in the step
    num_tasks: int
    local_task: int  # its number among the tasks on this node
    num_local_tasks: int
    node: int  # the number of this node in the step
    num_nodes: int
    first_host: str

    @property
    def port(self) -> int:
        """The port of the key-value store on the first host; equal in all tasks, different for concurrent steps."""
        return FIRST_PORT + (_STRIDE * self.job + self.step) % NUM_PORTS

    @property
    def keeps_store(self) -> bool:
        """Whether this task is the first one on the first host: task 0, unless tasks were distributed explicitly."""
        return (self.node, self.local_task) == (0, 0)


def step_of(environment: Mapping[str, str]) -> Step | None:
    """Return the step that the environment describes; None outside srun and in a step with one task.

    ``SLURM_NTASKS`` is no indication, as batch scripts, which run in one process, have it too. Nor are the variables of
    a step alone: a job that was submitted from within a step inherits them. There they contradict what SLURM set for
    the script.

    Raises
    ------
    ValueError
        A variable is missing or has an invalid value.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys():
        return None
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if num_tasks < 2 or _is_inherited(environment):
        return None
    node = _number(environment, "SLURM_NODEID")
    return Step(
        job=_number(environment, "SLURM_JOB_ID"),
        step=_number(environment, "SLURM_STEP_ID"),
        restarts=_number(environment, "SLURM_RESTART_COUNT", default=0),
        task=_number(environment, "SLURM_PROCID"),
        num_tasks=num_tasks,
        local_task=_number(environment, "SLURM_LOCALID"),
        num_local_tasks=tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))[node],
        node=node,
        num_nodes=_number(environment, "SLURM_STEP_NUM_NODES"),
        first_host=first_host(environment.get("SLURM_STEP_NODELIST", "")),
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list in SLURM's bracket notation.

    Examples
    --------
    >>> first_host("rack[2-3]n[08-10,12],gpu5")
    'rack2n08'
    """
    found = re.match(r"((?:[^,\[\]]|\[\d[\d,-]*\])+)(?:,|$)", node_list)
    if found is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={node_list!r} is not a list of hosts, such as node[01-03,7],gpu5; start the ranks "
            "with srun, or with torchrun"
        )
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", found[1])


def tasks_per_node(text: str) -> list[int]:
    """Return the counts in ``SLURM_STEP_TASKS_PER_NODE``, node by node.

    Examples
    --------
    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node, such as 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _is_inherited(environment: Mapping[str, str]) -> bool:
    """Return whether the step's variables belong to another job, from within which this one was submitted."""
    if _number(environment, "SLURM_STEP_NUM_NODES", default=0) > _number(
        environment, "SLURM_JOB_NUM_NODES", default=2**31
    ):
        return True
    if not {"SLURM_GTIDS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"} <= environment.keys():
        return False
    tasks_here = environment["SLURM_GTIDS"].split(",")
    counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = _number(environment, "SLURM_NODEID")
    return environment["SLURM_PROCID"] not in tasks_here or node >= len(counts) or counts[node] != len(tasks_here)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ValueError(f"{name} must be a number in a SLURM step, got {text!r}; start the ranks with srun")
    return int(text)
