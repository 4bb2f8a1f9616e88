"""Run many schedules, resumably, or one with what happens in it.

In ``tests/helpers``, ``python -m elastic_simulator FIRST LAST [FOLDER]``, ``python -m elastic_simulator SEED``, or
``python -m elastic_simulator FOLDER``, in which ``scripts/chaos.py`` has run.
"""

import collections
import dataclasses
import json
import sys
import time
from pathlib import Path

from loguru import logger

from elastic_simulator.fault_schedules import FaultSchedule, Simulation

_BLOCK = 500


def main(arguments: list[str]) -> int:
    if len(arguments) == 1:
        is_seed = arguments[0].isdecimal()
        return _show(FaultSchedule.draw(int(arguments[0])) if is_seed else FaultSchedule.recorded(Path(arguments[0])))
    first, last = map(int, arguments[:2])
    folder = Path(arguments[2] if len(arguments) > 2 else "simulated")
    folder.mkdir(parents=True, exist_ok=True)
    logger.disable("gossip")
    for begin in range(first, last, _BLOCK):
        seeds = range(begin, min(begin + _BLOCK, last))
        path = folder / f"{begin}-{seeds.stop}.json"
        if path.exists():
            continue
        began, outcomes, violations = time.process_time(), collections.Counter[str](), {}
        for seed in seeds:
            simulation = Simulation(FaultSchedule.draw(seed))
            try:
                outcomes.update(simulation.run().outcomes.values())
            except Exception as error:
                violations[seed] = f"{type(error).__name__}: {error}"
                print(f"seed {seed}: {violations[seed]}", flush=True)
        seconds = round(time.process_time() - began, 1)
        found = {"schedules": len(seeds), "outcomes": outcomes, "violations": violations, "seconds": seconds}
        path.write_text(json.dumps(found))
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    num_violations = sum(len(each["violations"]) for each in results)
    num_schedules, seconds = (sum(each[what] for each in results) for what in ("schedules", "seconds"))
    print(f"{num_schedules} schedules, {num_violations} violations, {seconds:.0f} s")
    return int(num_violations > 0)


def _shrunk(schedule: FaultSchedule) -> FaultSchedule:
    """Return a schedule in which something is wrong without those of its faults that it does not need for that."""
    for left_out in schedule.faults:
        shorter = dataclasses.replace(schedule, faults=[each for each in schedule.faults if each is not left_out])
        try:
            Simulation(shorter).run()
        except Exception:
            return _shrunk(shorter)
    return schedule


def _show(schedule: FaultSchedule) -> int:
    """Run a schedule, and the shortest one in which something is wrong."""
    simulation = Simulation(schedule)
    logger.remove()
    logger.add(lambda text: print(f"{simulation.scheduler.now:8.4f} {text}", end=""), format="{message}")
    try:
        simulation.run()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        logger.remove()
        print("shortest:", *_shrunk(schedule).faults, sep="\n  ")
        return 1
    finally:
        print(*simulation.log, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
