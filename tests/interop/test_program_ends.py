"""Five hundred programs end without ``close()``, also where peers are late or stuck: every status is the program's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from programs import run_programs

PROGRAM = """
import ctypes

from gossip.communication import daemon_threads

STUCK_RANK = world_size - 1
if number % 5:  # what C++ libraries do after the interpreter is gone takes most of the time: one in five shows it
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


@pytest.mark.parametrize(
    ("is_stuck", "world_size", "num_worlds"), [(False, 2, 25), (True, 6, 10)], ids=["finished", "stuck peer"]
)
def test_every_program_ends_with_its_own_status(
    tmp_path: Path, is_stuck: bool, world_size: int, num_worlds: int
) -> None:
    cases = [
        {"end": end, "stuck": is_stuck, "late": not is_stuck and number % 2 == 0, "scales": number % 3 == 0}
        for end in STATUSES
        for number in range(num_worlds)
    ]
    ended = run_programs(PROGRAM, tmp_path, cases=cases, world_size=world_size, at_once=6, timeout_s=280)
    found: Counter[tuple[object, int]] = Counter()
    for case, statuses in zip(cases, ended.statuses, strict=True):
        found.update((case["end"], status) for status in statuses.values())
    assert found == dict.fromkeys(STATUSES.items(), 50), ended.output
