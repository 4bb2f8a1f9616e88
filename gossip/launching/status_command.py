"""The command ``gossip status``: who trains, how fast, who waits for whom, and who was lost, as the ranks say."""

import argparse
import html
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from gossip.communication.authenticated_store import training_key
from gossip.elastic.connections.mesh import in_words
from gossip.elastic.training_status import VARIABLE, RankStatus, statuses, trainings
from gossip.errors import ExchangeError, LaunchError, reason
from gossip.launching.rendezvous import connect
from topologies.reports.units import aligned

_INTERVAL_S = 2.5  # ranks write once a second
_TIMEOUT = timedelta(seconds=10)
_NUM_LOST = 5
_DESCRIPTION = f"""\
Show the newest training in a key-value store: members, steps and their rate, who waits for whom, late messages, the
newest checkpoint, and the ranks that were lost last. It only reads.

Ranks with {VARIABLE}=1 and on_peer_loss="continue" write once a second what is shown. The store is that of `gossip
store`, or of the launcher: MASTER_ADDR:MASTER_PORT of torchrun. If the ranks have a GOSSIP_KEY, set it here, too."""

Statuses = Mapping[int, RankStatus]


def main(arguments: Sequence[str]) -> int:
    """Show the status of a training once, or again and again; return the exit status."""
    parser = argparse.ArgumentParser(
        "gossip status", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", metavar="HOST:PORT", help="where the key-value store is")
    parser.add_argument("--watch", action="store_true", help="again every few seconds, until Ctrl-C")
    parser.add_argument(
        "--page", type=int, metavar="PORT", help="also as a page, at http://127.0.0.1:PORT, until Ctrl-C"
    )
    parsed = parser.parse_args(arguments)
    host, _, port = parsed.address.rpartition(":")
    if not port.isdecimal():
        parser.error(f"HOST:PORT must end with the number of a port, such as node0:29400, got {parsed.address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT.total_seconds()).close()  # torch says more
        store, key = connect(parsed.address, _TIMEOUT), training_key()
        found = next(trainings(store, key), None)
        if found is None:
            raise LaunchError(
                f"no rank at {parsed.address} writes its status; start the ranks with {VARIABLE}=1 in their "
                'environment, and wrap the model with on_peer_loss="continue"'
            )
        server = None
        if parsed.page is not None:
            try:
                server = HTTPServer(("127.0.0.1", parsed.page), _Page)
            except (OSError, OverflowError) as error:
                why = f"--page: port {parsed.page} cannot be opened: {reason(error)}; choose another one, or 0 for any"
                raise LaunchError(why) from error
            print(f"http://127.0.0.1:{server.server_port}", flush=True)
        before, at = statuses(*found), time.monotonic()
        while True:
            ends_at = time.monotonic() + _INTERVAL_S
            while (left_s := ends_at - time.monotonic()) > 0:
                if server is None:
                    time.sleep(left_s)
                else:
                    server.timeout = left_s
                    server.handle_request()
            now, then = statuses(*found), time.monotonic()
            _Page.text = text(before, now, then - at)
            if parsed.watch or parsed.page is None:
                print(_Page.text, flush=True)
            if not parsed.watch and parsed.page is None:
                return 0
            before, at = now, then
    except OSError as error:
        print(f"error: there is no key-value store at {parsed.address}: {error.strerror or error}", file=sys.stderr)
        return 2
    except (ExchangeError, LaunchError, RuntimeError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


class _Page(BaseHTTPRequestHandler):
    """The newest text, as a page that loads itself again."""

    text = ""
    timeout = 1.0  # of a client that says nothing

    def do_GET(self) -> None:
        """Answer every request with it."""
        head = (
            '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>gossip status</title>'
        )
        page = f"{head}<pre>{html.escape(self.text)}</pre>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


def text(before: Statuses, now: Statuses, seconds: float) -> str:
    """Return what was said, and what of it has changed within some seconds."""
    speaking = {rank for rank in now if rank not in before or now[rank].number > before[rank].number}
    newest = max((now[rank] for rank in speaking or now), key=lambda each: each.generation, default=None)
    if newest is None:
        return "no rank has said anything yet"
    lines = [] if speaking else [f"no rank has said anything for {seconds:.1f} s: the training has ended or hangs"]
    lines += [f"generation {newest.generation}: {len(newest.members)} ranks train ({in_words(newest.members)})"]
    saved = max((each.saved_step for each in now.values() if each.saved_step is not None), default=None)
    lines.append("newest checkpoint: " + ("none" if saved is None else f"step {saved}"))
    rows: list[Sequence[str]] = [("rank", "step", "steps/s", "late", "")]
    rows += [_row(rank, before.get(rank), now.get(rank), rank in speaking, seconds) for rank in newest.members]
    lines += [line.rstrip() for line in aligned(rows, ">>>><")]
    lines += [f"lost: rank {rank}: {reason}" for rank, reason in newest.lost[-_NUM_LOST:]]
    return "\n".join(lines)


def _row(rank: int, before: Any, now: Any, speaks: bool, seconds: float) -> tuple[str, ...]:
    if now is None:
        return str(rank), "", "", "", "has said nothing yet"
    since = 0.0 if before is None else now.said_at - before.said_at
    rate = f"{(now.step - before.step) / since:.3g}" if since else ""
    waits = f"waits for {in_words(now.waits_for)}, {now.waited_s:.1f} s" if now.waits_for else ""
    return str(rank), str(now.step), rate, str(now.num_late), waits if speaks else f"silent for {seconds:.1f} s"
