"""Train digits while ranks are killed, frozen, cut off and told to leave, and come back; check that nothing is torn.

    python scripts/chaos.py outputs/chaos
    python scripts/chaos.py outputs/an_hour --seconds 3600 --ranks 8 --compression int8
    python scripts/chaos.py outputs/planned --seconds 10 --restarts 1 --faults kill:1@200 kill:4@400 kill:6@600

Faults follow from the seed, or are given by kind (kill, freeze, leave, cut, delay), number of the rank (those that come
back have new ones) and step. The folder gets the notes of all ranks, ``report.md``, ``report.json`` and ``course.svg``.
The exit status
is 1 if a message was mixed that nobody had sent, or if nobody trained to the end.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import cast, get_args

from loguru import logger

from gossip import COMPRESSIONS
from gossip.lab.faults.chaos_run import in_words, run
from gossip.lab.faults.chaos_worker import Chaos
from gossip.lab.faults.fault import Kind


def _planned(text: str) -> tuple[Kind, int, int]:
    found = re.fullmatch(rf"({'|'.join(get_args(Kind))}):(\d+)@(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND:RANK@STEP, with a kind of {', '.join(get_args(Kind))}")
    return cast("Kind", found[1]), int(found[2]), int(found[3])


def main() -> int:
    """Run, print, and say whether it went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for notes and reports; new")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they train (%(default)g)")
    parser.add_argument("--ranks", type=int, default=6, help="at the beginning (%(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (%(default)d)")
    parser.add_argument(
        "--steps-between-faults", type=int, default=150, help="on average, of all ranks together (%(default)d)"
    )
    parser.add_argument("--min-ranks", type=int, default=2, help="with fewer the run ends (%(default)d)")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of the model, in seconds (%(default)g)")
    parser.add_argument("--topology", default="one_peer_exponential")
    parser.add_argument("--compression", choices=COMPRESSIONS.available())
    parser.add_argument("--restarts", type=int, default=10_000, help="of a worker that fails (%(default)d)")
    parser.add_argument("--faults", type=_planned, nargs="+", default=(), dest="plan", metavar="KIND:RANK@STEP")
    arguments = vars(parser.parse_args())
    arguments["plan"] = tuple(arguments["plan"])
    folder: Path = arguments.pop("folder")
    if folder.exists():
        parser.error(f"{folder} is there already; name a new folder")
    logger.remove()
    logger.add(sys.stderr, format="{message}", level="WARNING")
    report = run(Chaos(**arguments), folder)
    print(in_words(report))
    return 1 if report["num_messages_torn"] or not report["num_ended"] else 0


if __name__ == "__main__":
    sys.exit(main())
