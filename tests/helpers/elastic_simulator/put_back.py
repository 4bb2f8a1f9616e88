"""Faults in the library that the simulation must find: some were there once, the others are of their kinds."""

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock


class PutBack(NamedTuple):
    """A fault: in this function, ``old`` is replaced by ``new``.

    It is found with these seeds, which a test holds of those that are common; others need hundreds or thousands.
    """

    function: str
    old: str
    new: str
    was_there: bool = False
    is_common: bool = False
    seeds: Sequence[int] = range(100)

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Within the block the library has the fault."""
        path, _, name = f"gossip.{self.function}".rpartition(".")
        try:
            module = owner = importlib.import_module(path)
        except ModuleNotFoundError:
            module_path, _, class_name = path.rpartition(".")
            module = importlib.import_module(module_path)
            owner = getattr(module, class_name)
        found = inspect.getattr_static(owner, name)
        function = found.fget if isinstance(found, property) else found
        function = getattr(function, "__wrapped__", function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.function} has {self.old!r} {source.count(self.old)} times"
        names: dict[str, object] = {}
        exec(compile(source.replace(self.old, self.new), path, "exec"), function.__globals__, names)
        with mock.patch.object(owner, name, names[name]):
            yield


_CONSENSUS = "elastic.membership_consensus.Consensus."
_ATTEMPT, _CUT_OFF = _CONSENSUS + "_attempt", _CONSENSUS + "_may_be_cut_off"
_OPERATIONS = "elastic.repeated_operations.RepeatedOperations."
_DETECTOR = "elastic.failure_detector.FailureDetector."
_FLAG, _VOTES = "elastic.elastic_flag.ElasticFlag.", "elastic.flag_votes.FlagVotes."
_MESH, _PEER = "elastic.connections.mesh.Mesh.", "elastic.connections.peer_connection.PeerConnection."
_OUTGOING = "elastic.connections.peer_connection.Outgoing."
_SOURCE, _TRANSFER = "elastic.state_transfer.StateSource.", "elastic.state_transfer."
_LATE, _EDGE = "exchange.late_messages.LateMessages.", "exchange.edge_transport.EdgeExchange."
_CHANGE = "step.generation_change.GenerationChange."
_JOINING = "elastic.joining_rank.JoiningRank."
_PROTOCOL = "elastic.membership_protocol.MembershipProtocol."
_OF_GROUPS = range(3, 403, 4)


def _of_two_kinds(number: int) -> Sequence[int]:
    """Return so many seeds of schedules that have several faults of few kinds."""
    return range(1_000_000, 1_000_000 + number)


FAULTS = (
    # ------------------------------------------------------------------ who trains
    PutBack(_CONSENSUS + "enter_step", 'self._wait_until(self._is_free, f"step {step}")', "self._check()", True, True),
    PutBack(_ATTEMPT, "gone & set(agreed.ended)", "()", True, True, (1017782,)),
    PutBack(_ATTEMPT, "if self._mesh.has_met(other)]", "]", True, True, (1055713,)),
    PutBack(_CONSENSUS + "_adopt", "not self._own_group().isdisjoint(agreed.ended)", "0", True),
    PutBack(_CONSENSUS + "have_passed", "> self.position", "> (99, 0, 0)", True, True, (1000076,)),
    PutBack(
        _CONSENSUS + "begin_together", "if self._absent_until.get(other, -1) < step", "", True, True, _of_two_kinds(30)
    ),
    PutBack(_CONSENSUS + "_decide", "if not missing:", "if len(missing) <= 1:", False, True, _of_two_kinds(80)),
    PutBack(_CONSENSUS + "_decide", "if is_asked and (lost", "if False and (lost", is_common=True, seeds=range(127)),
    PutBack(_ATTEMPT, "= self.position, self.is_joint", "= (0, 0, 0), self.is_joint", is_common=True),
    PutBack("elastic.generations.Generation.followed_by", "newest[1] + (not is_before)", "newest[1]", is_common=True),
    PutBack(_ATTEMPT, " - {*agreed.parting}", "", True, True, (251,)),
    PutBack(_OPERATIONS + "enter", " and key.kind != Kind.MESSAGE", "", True, True, (1410691,)),
    PutBack(
        _CONSENSUS + "_proposed",
        "in latest.left if other in have_ended",
        "in () if other in have_ended",
        True,
        True,
        (1017782,),
    ),
    PutBack("elastic.generations.Generation.followed_by", "self.joined_at < newest[:2]", "True", True, True, (792209,)),
    PutBack(
        "elastic.consensus_store.ConsensusStore._set_once",
        'self.store.compare_set, key, "",',
        "(lambda key, value: (self.store.set(key, value), self.store.get(key))[1]), key,",
        is_common=True,
    ),
    # ------------------------------------------------------------------ leaving
    PutBack(_CHANGE + "leave", "self._engine.step < last:", "False:", is_common=True, seeds=_of_two_kinds(11)),
    PutBack(_CONSENSUS + "_adopt", "= False, first_step", "= False, 0", is_common=True, seeds=_of_two_kinds(11)),
    PutBack(_CONSENSUS + "_proposed", "{*self._suspects, *leaving}", "self._suspects", False, True, _of_two_kinds(11)),
    PutBack(_CONSENSUS + "has_left", ">= self._leaves_at", "> self._leaves_at", False, True, _of_two_kinds(44)),
    PutBack(_CONSENSUS + "leave", "and self.ends_at is None", "", True, True, (3111,)),
    PutBack(_CONSENSUS + "_adopt", "self._is_ending |= is_last", "pass", True),
    PutBack(_CHANGE + "_give", "if not (at_step_end", "if False and not (at_step_end", True),
    PutBack(_ATTEMPT, "{*agreed.members, *agreed.leaving}", "set(agreed.members)", is_common=True),
    # ------------------------------------------------------------------ the failure detector, and what all do together
    PutBack(_OPERATIONS + "collectively", "self.consensus.commit", "(lambda *_: True)", False, True, (1000012,)),
    PutBack(_DETECTOR + "_is_suspect", "if position is None:", "return True\n    if True:", False, True, (1000177,)),
    PutBack(_DETECTOR + "_is_suspect", "num_steps * timeout_s", "0", True),
    PutBack(_DETECTOR + "wait_until", "self.consensus.miss(left)", "pass", is_common=True),
    PutBack(_DETECTOR + "wait_until", "if suspects and waited_s > timeout_s:", "if suspects:", False, True, (513,)),
    PutBack(_DETECTOR + "exchange", "self.is_joint or not self.is_in_step", "False", True, True, (1202678,)),
    PutBack(_DETECTOR + "exchange", "if lost or self", "if lost or False and self", is_common=True),
    # ------------------------------------------------------------------ shard groups
    PutBack(
        _PROTOCOL + "_of_whole_groups",
        "self._group_of(member) not in incomplete",
        "member not in set(missing)",
        is_common=True,
        seeds=_OF_GROUPS,
    ),
    PutBack(_PROTOCOL + "_may_join", "for mate in own", "for mate in {self._mesh.member}", True, True, (919455,)),
    PutBack(_DETECTOR + "exchange", "turn is None and not in_group", "turn is None", is_common=True, seeds=_OF_GROUPS),
    PutBack(
        _OPERATIONS + "collectively",
        "self.member not in generation.members",
        "False",
        True,
        True,
        range(1_000_003, 1_000_111, 4),
    ),
    # ------------------------------------------------------------------ partitions
    PutBack(_ATTEMPT, "= self._may_be_cut_off(proposed.members)", "= False", True, True, (1000150,)),
    PutBack(_CUT_OFF, "has_just_woken or", "", True, True, (463536,)),
    PutBack(_CUT_OFF, "is_waking or", "", True, True, (77780,)),
    PutBack(_CUT_OFF, "thawed + self._timeout.total_seconds()", "thawed + 0.3", True, True, (889208,)),
    PutBack(_CUT_OFF, "for mate in self._own_group())", "for mate in (self._mesh.member,))", True, True, (772251,)),
    PutBack(_MESH + "_serve", "self.woke_at = heard_at", "pass", True, True, (625305,)),
    PutBack(_MESH + "connect", "self.changed, self.waits()", "self.changed", True, True, (1424438,)),
    PutBack(_ATTEMPT, "member in latest.members and member not in asked", "False", True, True, (454720,)),
    PutBack(_ATTEMPT, "2 * len(proposed.members) < len(latest.members)", "False", False, True, (378,)),
    PutBack(_ATTEMPT, "= is_early * self", "= 0 * self", True, True, (9189,)),
    PutBack(
        _CONSENSUS + "_is_due", "if self._alarm > self._num_attempts:", "if False:", False, True, _of_two_kinds(23)
    ),
    PutBack(_CONSENSUS + "_decide", "running.passed() > self._timeout.total_seconds()", "False", False, True, (895,)),
    PutBack(_CONSENSUS + "_adopt", "if member in before.members and", "if 0 and", is_common=True),
    PutBack(_ATTEMPT, "self._mesh.cut(other, reason)", "pass", False, True, (1000512,)),
    PutBack(_ATTEMPT, "self._suspects = left_out | self._suspects", "pass", True, True, (903592,)),
    # ------------------------------------------------------------------ rejoining
    PutBack(_JOINING + "be_admitted", "if self._returns else", "if False else", True),
    PutBack(_CHANGE + "_come_back", "engine.drop_in_flight()", "pass", False, True, (200,)),
    PutBack(_CHANGE + "_come_back", "engine.on_step_end = self.begin_step", "pass", False, True, (1000541,)),
    PutBack(_CHANGE + "_join", "returns=self._is_in_loop", "returns=False", False, True, (1000324,)),
    PutBack(
        "elastic.elastic_world.ElasticWorld.come_back", "self._take_number()", "self._listen()", False, True, (1000056,)
    ),
    PutBack(_CONSENSUS + "_adopt", "first_step - (other in returning)", "first_step", False, True, (1000324,)),
    # ------------------------------------------------------------------ flags
    PutBack(_FLAG + "wait", "self._world.member not in latest.members", "False", True, seeds=_of_two_kinds(374)),
    PutBack(_FLAG + "vote", "if each not in consensus.apart", "", True),
    PutBack(_FLAG + "wait", "or_later=leaves", "or_later=False", True),
    PutBack(_FLAG + "wait", "or consensus.is_left_behind", "", True, True, (935835,)),
    PutBack(_FLAG + "wait", "answer |= bool(vote)", "answer = bool(vote)", is_common=True),
    PutBack(_FLAG + "wait", "member not in are_agreed_on", "True", is_common=True),
    PutBack(_VOTES + "take_over", "self._put", "(lambda *_: None)", is_common=True),
    PutBack(_VOTES + "_note", "divmod(third, 2)", "divmod(third, 2)[0], 0", is_common=True),
    PutBack(_VOTES + "votes_of", "if yes", "if not yes", is_common=True, seeds=range(137)),
    # ------------------------------------------------------------------ frames
    PutBack(_OUTGOING + "send", "self._left[0] = self._left[0][num_bytes:]", "pass", is_common=True),
    PutBack(
        _PEER + "enqueue",
        "before = sum(waiting.has_begun or waiting.number <= frame.number for waiting in self.outgoing)",
        "before = 0",
        is_common=True,
    ),
    PutBack(_PEER + "_take_in", "self._await_header()", "pass", is_common=True),
    PutBack(_MESH + "give_back", "self.on_given_back(payload)", "kept.append(payload)", is_common=True),
    PutBack(_MESH + "_lose", "self.on_lost(member, self.lost[member])", "pass", is_common=True),
    # ------------------------------------------------------------------ state transfer
    PutBack(
        _SOURCE + "asked_by", "_SECOND if member in self._mesh.lost else _FIRST", "_SECOND", True, True, (1411364,)
    ),
    PutBack(_SOURCE + "begun", "is returning", "is not returning", is_common=True),
    PutBack(_SOURCE + "give", "self._begun[member] = asked[1]", "pass", is_common=True, seeds=_of_two_kinds(59)),
    PutBack(_SOURCE + "_send", "sha256(content.numpy().data)", "sha256()", False, True, (1000056,)),
    PutBack(_CHANGE + "_join", "= generation.first_step", "= generation.first_step - 1", is_common=True),
    PutBack(_SOURCE + "_on_ask", "bool(third)", "False", False, True, (1000324,)),
    # ------------------------------------------------------------------ late messages
    PutBack(_LATE + "arrived", "if is_right or (", "if (", is_common=True, seeds=_of_two_kinds(36)),
    PutBack(_LATE + "arrived", "mul_(late.weight)", "mul_(1.0)", is_common=True),
    PutBack(
        _LATE + "arrived", "or (late.member in mesh.lost and late.member not in mesh.left)", "", False, True, (1000068,)
    ),
    PutBack(_EDGE + "_receive", "self.dropped.add(place)", "pass", is_common=True),
    PutBack(_EDGE + "_puts_off", "self.dropped.add(place)", "pass", is_common=True, seeds=_of_two_kinds(11)),
)
