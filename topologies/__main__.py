"""``topologies``, or ``python -m topologies``: list, describe, compare and draw topologies from a terminal."""

import argparse
import ast
import inspect
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topologies.command_lines import Parser, ends_quietly
from topologies.drawing import draw, draw_comparison
from topologies.drawing.picture_files import output_path
from topologies.reports.comparing import compare
from topologies.reports.family_samples import markdown_table
from topologies.reports.recommending import recommend
from topologies.topology import Topology, available, build, family, options_of

#: Rows of ``recommend`` without ``--all``.
_RECOMMENDED = 5


#: From a unit's first letter to bytes.
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 after one line about what is wrong."""
    parsed = _parser().parse_args(arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            output = parsed.run(parsed)
        except (ValueError, TypeError, OSError, ImportError) as error:
            print(f"{_program()}: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    for warning in caught:
        print(f"{_program()}: warning: {warning.message}", file=sys.stderr)
    print(output)
    return 0


def command() -> int:
    """Run the console command, whose exit status this is."""
    return ends_quietly(main)


def _program() -> str:
    return "topologies" if Path(sys.argv[0]).name == "topologies" else "python -m topologies"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=_program(), description="Communication topologies for decentralized learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    commands.add_parser("list", help="the families and their options").set_defaults(run=_list)

    description = commands.add_parser("describe", help="what can be measured of a topology")
    _add_topology(description)
    description.add_argument("--json", action="store_true", help="as JSON instead of text")
    description.set_defaults(run=_describe)

    drawing = commands.add_parser("draw", help="a picture of its rounds")
    _add_topology(drawing)
    drawing.add_argument("--output", required=True, metavar="PATH", help="where to write, .svg or .png")
    drawing.add_argument(
        "--rounds", type=int, metavar="K", help="how many rounds, at most 32 (default: a period, at most 8)"
    )
    drawing.set_defaults(run=_draw)

    comparison = commands.add_parser("compare", help="how fast they agree, in rounds and in bytes, as a table")
    _add_cluster(comparison)
    comparison.add_argument("--bytes", type=_bytes, default=1.0, metavar="SIZE", help="of one message, such as 100MB")
    comparison.add_argument("--csv", action="store_true", help="as CSV instead of text")
    comparison.add_argument("--output", metavar="PATH", help="also write the figure, .svg or .png")
    comparison.set_defaults(run=_compare)

    recommendation = commands.add_parser("recommend", help="rank them by predicted time, with the arithmetic")
    _add_cluster(recommendation)
    recommendation.add_argument("--latency-us", type=float, required=True, metavar="US", help="of one step, in us")
    recommendation.add_argument(
        "--bandwidth-gbps", type=float, required=True, metavar="GBPS", help="of a node's link, in Gbit/s"
    )
    recommendation.add_argument("--message-mb", type=float, required=True, metavar="MB", help="of one message, in MB")
    recommendation.add_argument("--all", action="store_true", help=f"not only the first {_RECOMMENDED}")
    recommendation.set_defaults(run=_recommend)

    table = commands.add_parser("table", help="all families with their key figures, in Markdown")
    table.add_argument("--world-size", type=int, default=16, metavar="N", help="number of ranks measured (default: 16)")
    table.set_defaults(run=lambda parsed: markdown_table(parsed.world_size))
    return parser


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="families (default: all that serve N)")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--local-size", type=int, default=1, metavar="L", help="ranks per node (default: 1)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="X", help="share of the worst disagreement (default: 0.01)"
    )


def _bytes(text: str) -> float:
    """Read a number with a unit of 1000: 100MB, 1.5 GB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(?:([kKMGT]?)B)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"a size is a number and B, kB, MB, GB or TB, got {text!r}")
    return float(match[1]) * _UNITS[(match[2] or "").upper()]


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a family, see list")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the family, such as local_size=4, factors=2,3 or graph=net.graphml; repeatable",
    )
    parser.add_argument("--every", type=int, default=1, metavar="K", help="exchange in every K-th round only")
    parser.add_argument("--warmup-rounds", type=int, default=0, metavar="W", help="complete for the first W rounds")


def _list(_: argparse.Namespace) -> str:
    width = max(map(len, available()))
    lines = []
    for name in available():
        function = family(name)
        options = ", ".join(
            name if option.default is option.empty else f"{name}={option.default}"
            for name, option in options_of(function).items()
        )
        summary = (inspect.getdoc(function) or "").split("\n", 1)[0].replace("``", "")
        lines.append(f"{name:<{width}}  {f'[{options}] ' if options else ''}{summary}".rstrip())
    return "\n".join(lines)


def _describe(parsed: argparse.Namespace) -> str:
    description = _topology(parsed).describe()
    return json.dumps(description.to_dict(), indent=2) if parsed.json else str(description)


def _draw(parsed: argparse.Namespace) -> str:
    draw(_topology(parsed), parsed.output, parsed.rounds)
    return f"wrote {parsed.output}"


def _compare(parsed: argparse.Namespace) -> str:
    if parsed.output:
        output_path(parsed.output)
    comparison = compare(
        parsed.names or None,
        world_size=parsed.world_size,
        message_bytes=parsed.bytes,
        local_size=parsed.local_size,
        tolerance=parsed.tolerance,
    )
    if parsed.output:
        draw_comparison(comparison, parsed.output)
    return comparison.to_csv().rstrip() if parsed.csv else str(comparison)


def _recommend(parsed: argparse.Namespace) -> str:
    found = recommend(
        parsed.world_size,
        topologies=parsed.names or None,
        latency_us=parsed.latency_us,
        bandwidth_gbps=parsed.bandwidth_gbps,
        message_mb=parsed.message_mb,
        local_size=parsed.local_size,
        tolerance=parsed.tolerance,
    )
    return found.to_text(None if parsed.all else _RECOMMENDED)


def _topology(parsed: argparse.Namespace) -> Topology:
    topology = build(parsed.name, parsed.world_size, **_options(parsed.option)).every(parsed.every)
    if not parsed.warmup_rounds:
        return topology
    return build("complete", parsed.world_size).then(topology, after=parsed.warmup_rounds)


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}; write for example --option local_size=4")
        if key in options:
            raise ValueError(f"--option {key} is given twice; give it once")
        options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    """Read JSON, or a Python literal such as 2,3; anything else is a text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


if __name__ == "__main__":
    sys.exit(command())
