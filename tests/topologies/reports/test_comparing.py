"""compare(), recommend(), their command lines, and which topologies are another one in disguise."""

import csv
import io
import itertools
import json
import re
from pathlib import Path

import pytest

import topologies
from topologies import Round, Topology, analysis
from topologies.__main__ import main
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises


def test_rows_are_what_the_analysis_says() -> None:
    found = topologies.compare(world_size=12, message_bytes=4e6, local_size=3, tolerance=0.05)
    for row, topology in zip(found.rows, found.topologies, strict=True):
        assert row.period == topology.period
        assert row.exact_after == topology.exact_after
        assert row.rounds == analysis.rounds_to(topology, 0.05)
        assert row.rate == analysis.consensus_rate(topology)
        assert row.rate_per_byte**row.bytes_per_round == pytest.approx(row.rate)
        traffic = analysis.traffic(topology, message_bytes=4e6, local_size=3)
        assert row.network_bytes_per_round == traffic.network_bytes
        sent = [traffic.rounds[k % len(traffic.rounds)].sent.mean() for k in range(row.rounds or 0)]
        assert row.bytes == pytest.approx(4e6 * sum(sent))
        crossed = [traffic.rounds[k % len(traffic.rounds)].sent_by_node.sum() for k in range(row.rounds or 0)]
        assert row.network_bytes == pytest.approx(4e6 * sum(crossed))
    in_order = [row.bytes for row in found.rows]
    assert in_order == sorted(in_order)


def test_what_never_agrees_comes_last() -> None:
    apart = Topology.from_rounds([Round.from_groups(4, [(0, 1), (2, 3)])], name="apart")
    found = topologies.compare([apart, "ring"], world_size=4)
    assert [row.topology for row in found.rows] == ["ring", "apart"]
    last = found.rows[-1]
    assert (last.rounds, last.bytes, last.exact_after) == (None, None, None)
    assert last.rate == pytest.approx(1.0)
    assert "never" in str(found).splitlines()[-1]


def test_csv_and_dicts_hold_the_same_rows() -> None:
    found = topologies.compare(["ring", "one_peer_exponential", "random_matching"], world_size=6)
    dicts = found.to_dicts()
    assert json.loads(json.dumps(dicts, allow_nan=False)) == dicts
    read = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [list(row) for row in read] == [list(row) for row in dicts]
    for line, row in zip(read, dicts, strict=True):
        assert {key: "" if value is None else str(value) for key, value in row.items()} == line


def test_every_topology_that_was_asked_for_has_a_name_in_the_figure(tmp_path: Path) -> None:
    asked = [
        "ring", "torus", "exponential", "one_peer_exponential", "base", "random_matching", "matcha", "local_global",
        "complete", "star", "path", "directed_ring",
    ]  # fmt: skip
    found = topologies.compare(asked, world_size=24, message_bytes=1e6)
    assert len(found.rows) > 10  # more than there are colours
    for name in ("asked.svg", "again.svg"):
        topologies.draw_comparison(found, tmp_path / name)
    text = (tmp_path / "asked.svg").read_text()
    assert text == (tmp_path / "again.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("rounds", "bytes sent per rank"))
    for row in found.rows:
        assert f"<!-- {row.topology} -->" in text or f"<!-- = {row.topology} -->" in text, row.topology
    assert "in grey" not in text
    legend = text[text.index('id="legend_1"') :]
    dashes = re.findall(r'style="fill: none;( stroke-dasharray: [^;]+;)?[^"]*stroke: (#\w+)', legend)
    assert len(dashes) == len(set(dashes)) == legend.count("<!-- ") - 1  # the title is not a line's


def test_recommendation_by_hand() -> None:
    found = topologies.recommend(12, latency_us=10, bandwidth_gbps=8, message_mb=1, local_size=3)
    by_name = {each.topology.name: each for each in found.ranked}
    # A message takes 1 ms. Across: 4 nodes in 3 rings of 4 each: 6 steps, and 3 x 1.5 messages leave a node.
    local_global = by_name["local_global"]
    assert local_global.rounds == 2
    assert local_global.seconds == pytest.approx(6 * 10e-6 + 4.5e-3)
    assert local_global.longest_round_seconds == pytest.approx(6 * 10e-6 + 4.5e-3)
    assert local_global.arithmetic == "1 inside nodes + 1 x (6 x 10 us + 4.5 x 1 MB / 8 Gbit/s)"
    complete = by_name["complete"]
    assert complete.seconds == pytest.approx(22 * 10e-6 + 2 * 11 / 12 * 1e-3)
    rounds = analysis.rounds_to(topologies.build("ring", 12), 0.01)
    assert by_name["ring"].seconds == pytest.approx(rounds * (10e-6 + 2e-3))  # a node sends one each way
    assert by_name["ring"].rounds == rounds


def test_named_topologies_are_ranked_alone() -> None:
    named = ["complete", topologies.build("ring", 8).every(2)]
    found = topologies.recommend(8, topologies=named, latency_us=1, bandwidth_gbps=1, message_mb=1)
    assert [row["topology"] for row in found.to_dicts()] == ["complete", "ring.every(2)"]
    assert json.loads(json.dumps(found.to_dicts(), allow_nan=False)) == found.to_dicts()


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figure.png"
    assert main(["compare", "--world-size", "8", "--bytes", "100MB", "ring", "base", "--output", str(figure)]) == 0
    assert capsys.readouterr().out.startswith("8 ranks, messages of 100 MB")
    assert figure.stat().st_size > 1000
    assert main(["compare", "--world-size", "8", "--csv", "ring"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("ring,1,2,2.0,")
    arguments = ["--latency-us", "20", "--bandwidth-gbps", "25", "--message-mb", "100"]
    assert main(["recommend", "--world-size", "24", "--local-size", "8", *arguments]) == 0
    out = capsys.readouterr().out
    assert "24 ranks, 8 ranks per node; a message of 100 MB takes 32 ms" in out
    assert "46 x 20 us + 1.917 x 100 MB / 25 Gbit/s" in out
    assert main(["compare", "--world-size", "8", "rng"]) == 2
    assert "unknown topology 'rng'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "num_rows"), [([], 5), (["ring", "path"], 2)])
def test_recommend_prints_heads_five_rows_and_a_sentence(
    arguments: list[str], num_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ["--latency-us", "50", "--bandwidth-gbps", "1", "--message-mb", "50", "--world-size", "4"]
    assert main(["recommend", *network, *arguments]) == 0
    default, introduction, table, sentence = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    beginning = "one_peer_exponential, the default, agrees after 800.1 ms, its longest round takes 400.1 ms; "
    others = "nothing below agrees sooner." if arguments else "complete agrees after 600.3 ms, its longest round takes"
    assert default[0].startswith(beginning + others)
    assert introduction[0].startswith("4 ranks, 1 rank per node; a message of 50 MB takes 400 ms")
    heads, *rows = table
    assert re.split("  +", heads.strip()) == ["topology", "longest round", "time to 1 %", "= exchanges"]
    assert [int(row.split(".")[0]) for row in rows] == list(range(1, num_rows + 1))
    assert len({row.index("  = ") for row in table}) == 1
    assert all(row[: row.index("  = ")].endswith(("ms", " s")) for row in rows)
    first = rows[0].split()[1]
    ranked = "Ranked by the time until the ranks agree on a mean, to 1 %: .* ask `gossip probe`"
    assert re.match(ranked, " ".join(sentence[1:]))
    assert sentence[0].startswith(f"{first} agrees first, after ")
    assert ("15 more take longer, see them with --all" in sentence[0]) == (num_rows == 5)
    assert ("19 others, whose exchanges are those of one of them, are left out" in sentence[0]) == (num_rows != 2)
    assert sentence[0].endswith(".")


PAIRS = (Round.from_groups(4, [(0, 1), (2, 3)]), Round.from_groups(4, [(0, 2), (1, 3)]))
EMPTY = Round.identity(4)


def kept(*candidates: Topology) -> list[int]:
    """The places of the candidates that stay."""
    found = without_disguises(candidates)
    return [place for place, candidate in enumerate(candidates) if any(candidate is each for each in found)]


def test_empty_rounds_do_not_make_a_topology() -> None:
    plain = Topology.from_rounds(PAIRS)
    for rounds in ([EMPTY, *PAIRS], [PAIRS[0], EMPTY, PAIRS[1]], [*PAIRS, EMPTY, *PAIRS]):
        assert kept(Topology.from_rounds(rounds), plain) == [1]
    assert len(kept(Topology.from_rounds([*PAIRS, *PAIRS]), plain)) == 1
    assert kept(plain.every(3), plain.every(2)) == [1]
    assert kept(plain, Topology.from_rounds([EMPTY])) == [0, 1]


def test_other_rounds_another_order_or_other_weights_are_another_topology() -> None:
    plain = Topology.from_rounds(PAIRS)
    half = Round.from_edges(4, [0, 1, 2, 3], [1, 0, 3, 2], 0.25)
    others = [PAIRS[::-1], PAIRS[:1], [*PAIRS, PAIRS[1]], [half, PAIRS[1]]]
    assert kept(plain, *map(Topology.from_rounds, others)) == [0, 1, 2, 3, 4]


def test_random_rounds_that_leave_nothing_to_chance() -> None:
    complete, matching, other = (topologies.build(name, 2) for name in ("complete", "random_matching", "equi_dyn"))
    activated = topologies.build("matcha", 2, graph="ring")  # the only edge, or none
    assert kept(matching, activated, complete, other) == [2, 3]
    seeds = [topologies.build("random_matching", 6, seed=seed) for seed in (0, 1, 0)]
    assert kept(*seeds) == [0, 1]


def test_a_warmup_is_not_taken_for_a_disguise() -> None:
    complete, ring = topologies.build("complete", 5), topologies.build("ring", 5)
    assert kept(complete.then(ring, after=10), ring, complete) == [0, 1, 2]


def test_the_plainest_name_stays() -> None:
    names = {
        n: [title_of(each) for each in without_disguises(chosen_topologies(None, n, local_size))]
        for n, local_size in ((2, 1), (4, 4))
    }
    assert names[2] == ["equi_dyn", "one_peer_exponential"]  # the default, of those without options
    assert {"complete", "one_peer_hypercube", "one_peer_ring", "hypercube"} <= set(names[4])
    assert not {"base (k=3)", "de_bruijn (p=4)", "grid (shape=(2, 2))", "local_global (local_size=4)"} & set(names[4])


@pytest.mark.parametrize("n", [5, 8])
def test_what_stays_differs_and_what_goes_is_there(n: int) -> None:
    def exchanges(topology: Topology) -> list[list[list[float]]]:
        rounds = (topology.round(t) for t in range(400))
        return [
            each.matrix().round(9).tolist() for each in itertools.islice((r for r in rounds if not r.is_identity), 16)
        ]

    candidates = [each for each in chosen_topologies(None, n, 1) if each.period is not None]
    found = without_disguises(candidates)
    staying = [exchanges(each) for each in found]
    assert all(staying.count(each) == 1 for each in staying)
    assert all(exchanges(each) in staying for each in candidates)
