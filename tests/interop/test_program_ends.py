"""Programs end without ``close()``, also where peers are late or stuck: every status is the program's."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from covering import covering
from programs import run_programs

PROGRAM = """
import ctypes

from gossip.communication.host import daemon_threads

STUCK_RANK = world_size - 1
if not case["unloads"]:  # what C++ libraries do after the interpreter is gone takes most of the time
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def run():
    model = build(scaler=torch.amp.GradScaler("cpu") if case["scales"] else None)
    train(model, 2)
    if (case["stuck"] or case["late"]) and rank == STUCK_RANK:
        os.read(heard, 1)  # until it is killed, or rank 0 ends
    train(model, 1)
    for thread, ending in list(daemon_threads._endings.items()):  # else the model's timeout
        daemon_threads._endings[thread] = ending._replace(patience=daemon_threads.CLOSING_PATIENCE)
    if case["late"] and rank == 0:
        atexit.register(os.write, tell, b".")
    return model


if case["end"] == "in a function":
    run()
else:
    model = run()
if case["end"] == "destroy_process_group":
    dist.destroy_process_group()
if case["end"] == "sys.exit":
    sys.exit(3)
if case["end"] == "an exception":
    raise ValueError("of the program's own")
"""

STATUSES = {"in a function": 0, "globally": 0, "sys.exit": 3, "an exception": 1, "destroy_process_group": 0}
YES_NO = (False, True)

FINISHED = [
    {"end": end, "stuck": False, "late": late, "scales": scales, "unloads": unloads}
    for end, late, scales, unloads in covering(itertools.product(STATUSES, YES_NO, YES_NO, YES_NO))
]
STUCK = [
    {"end": end, "stuck": True, "late": False, "scales": number > 0, "unloads": number == 1}
    for end in STATUSES
    for number in range(2)
]


@pytest.mark.parametrize(
    ("cases", "world_size"), [pytest.param(FINISHED, 2, id="finished"), pytest.param(STUCK, 6, id="stuck peer")]
)
def test_every_program_ends_with_its_own_status(
    tmp_path: Path, cases: list[dict[str, object]], world_size: int
) -> None:
    """Every way to end in every state; what a fault of the threads does is found without chance in tests/gossip."""
    ended = run_programs(PROGRAM, tmp_path, cases=cases, world_size=world_size, at_once=6, timeout_s=280)
    found, wanted = Counter[tuple[object, int]](), Counter[tuple[object, int]]()
    for case, statuses in zip(cases, ended.statuses, strict=True):
        found.update((case["end"], status) for status in statuses.values())
        wanted[case["end"], STATUSES[str(case["end"])]] += world_size - bool(case["stuck"])
    assert found == wanted, ended.output
