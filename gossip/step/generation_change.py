"""The transition of a model from one generation to the next: other ranks, another topology, what depends on them."""

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from loguru import logger

from gossip.algorithms import Algorithm, resolve_algorithm
from gossip.communication import training_store
from gossip.communication.world import World
from gossip.elastic.connections.mesh import in_words
from gossip.elastic.connections.peer_connection import Kind
from gossip.elastic.elastic_world import ElasticWorld
from gossip.elastic.generations import Generation
from gossip.elastic.joining_rank import JoiningRank
from gossip.elastic.state_transfer import take_second_part
from gossip.errors import CannotJoinError, ExchangeError, GenerationEndedError, ManifestError, reason, warn_user
from gossip.exchange.edge_transport import make_generation_transport
from gossip.exchange.recording import Agreed, Ended, Idle, Joined, Members, Recorder
from gossip.exchange.transport import Transport
from gossip.parameters.manifest import check_manifest
from gossip.parameters.names import named_parameters
from gossip.parameters.serializable_state import deserialize, serialize
from gossip.step.building.construction import Parts
from gossip.step.building.wrapper_arguments import Arguments, prepare_algorithm, resized_or
from gossip.step.engine import do_nothing
from gossip.step.preemption import Preemption
from gossip.step.state.algorithm_state import algorithm_state, common_state
from gossip.step.state.kept_objects import GivenObjects, KeptObjects, group_options
from gossip.step.state.replica_state import module_state, optimizer_state, own_options, restore_replica
from topologies import Topology

_AGREEING = "averaging what the algorithm keeps alike on all ranks"
_PAUSE_S = 0.1
_PATIENCE_TIMEOUTS = 5
_MOST_ANEW = 3


class GenerationChange:
    """Takes a model, which it does not own, from generation to generation."""

    def __init__(self, model: Any, world: World, parts: Parts, arguments: Arguments, kept: KeptObjects) -> None:
        assert isinstance(world, ElasticWorld)
        # The model exchanges along this generation's topology; the rank is this one's place among its members.
        self.generation, self.rank = world.generation, world.rank
        if len(world.holding_shard(self.generation.members)) != parts.topology.world_size:  # some were lost meanwhile
            self.generation = Generation(0, tuple(range(parts.topology.world_size * world.group_size)))
        self._model = weakref.ref(model)
        self._world, self._parts, self._engine, self._arguments = world, parts, parts.engine, arguments
        self._kept = weakref.proxy(kept)
        self._is_in_loop = self._begins_recording = False
        self._num_anew = 0  # how often it has joined anew since it trained
        self._joined_at: int | None = None
        self._astray: str | None = None
        self._is_checked = False
        self._own_options: set[tuple[str, int, str]] = set()  # of which it has been said that they are not given
        self._has_common_state = True

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train, numbered as at the beginning; with shard groups, these."""
        world = self._world
        return tuple(member // world.group_size for member in world.holding_shard(self.generation.members))

    def begin(self) -> None:
        """Enter the first generation, or join the ranks that train. Collective."""
        end_joining = do_nothing
        if self._arguments.record is not None:
            self._world.record = Recorder(self._arguments.record, self._world.member)
        if self._world.is_alone:
            end_joining = self._join()
        else:
            self._world.publish(self._parts.manifest)
            self._tell_what_is_not_given()
            self._begins_recording = self._world.is_in_step
        engine, kept = weakref.proxy(self._engine), self._kept
        self._world.tell_status(
            lambda: {"step": engine.step, "num_late": engine.num_late, "saved_step": kept.newest_saved}
        )
        self._engine.on_step_end = self.begin_step
        self._engine.exchanges.on_astray = self._note_astray
        self._engine.on_step_begin = self._end_pause
        self.begin_step(end_joining)
        self._is_in_loop = True
        Preemption(self._engine, self._world, self._model, self._arguments.on_preemption).install()

    # A rank that joins starts where its source begins a step, after everything that happens between two steps; a rank
    # that returns does so within its loop, where its source ends a step. If ranks make their steps together, they take
    # most of the state earlier, at the end of any step, and the rest, whose history matters, at this point.

    def _end_pause(self) -> None:
        """Act at the beginning of a step, after everything that happens between two steps."""
        if self._begins_recording:
            self._begins_recording = False
            self._record_members()
        if not self._engine.exchanges.has_update:
            self._world.record(Idle(self._world.member, self._engine.step))
        self._give(at_step_end=False)
        self._kept.end_joining()

    def begin_step(self, end_joining: Callable[[], None] = do_nothing) -> None:
        """Enter the generation of the next step; waits while the ranks agree on one.

        A rank that joins ends that, see :meth:`_join`; one whose source is lost before that joins anew.
        """
        step = self._step
        if self._engine.last_meter is not None:
            self._engine.last_meter.is_store_lost = self._world.is_store_lost
        self._world.consensus.is_new &= self._engine.step == self._joined_at
        if self._world.is_joint:  # a checkpoint is being loaded: ranks in a collective operation are in a generation
            self._world.consensus.note_loaded(step)
            if not self._begins_recording:
                self._record_members()  # that it is another step tells whoever reads it
            return
        try:
            if self._astray is not None:
                raise ExchangeError(self._astray)
            generation = self._world.consensus.enter_step(step)
        except ExchangeError as lost:
            end_joining = self._come_back(lost)
            generation = self._world.consensus.enter_step(self._step)
        if self._world.member not in generation.members:
            return  # this rank leaves: this was its last step
        if generation.number >= self._world.generation.number:
            self._world.enter(generation)
        self._follow(generation)
        self._check_state()
        self._give(at_step_end=True)
        try:
            end_joining()
        except CannotJoinError:
            raise
        except ExchangeError as error:
            self._num_anew += 1
            if self._world.group_size > 1 or self._num_anew > _MOST_ANEW:
                again = "start this rank again, or its shard group (restart= of gossip.launch does)"
                raise ExchangeError(f"{error}; {again}, to take the state of another one") from error
            self._note_astray(str(error))  # it takes the state of another rank
            self.begin_step()
        else:
            self._num_anew = 0

    def _note_astray(self, why: str) -> None:
        """Take over another rank's values at the end of this step, like a rank that was cut off from the others."""
        self._astray = why

    def _tell_what_is_not_given(self) -> None:
        options = {
            (type(optimizer).__name__, group, key) for optimizer, group, key in own_options(self._parts.optimizers)
        }
        for kind, group, key in sorted(options - self._own_options) if self.rank == 0 else ():
            warn_user(
                f"option {key!r} of parameter group {group} of {kind} is not plain data (numbers, strings, tensors, "
                "lists, dicts): a rank that joins keeps its own, if it has set it, and gossip.save will refuse it"
            )
        self._own_options |= options

    def _check_state(self) -> None:
        """Say after the first step if no rank will be able to join, because this rank cannot give its state."""
        if self._is_checked or self._engine.step == 0:
            return
        self._is_checked = True
        if self.rank != 0:
            return
        self._tell_what_is_not_given()
        try:
            self._state()
            self._kept.states()
        except Exception as error:
            warn_user(f"no rank can join this training or come back, and gossip.save will fail: {reason(error)}")

    def _give(self, *, at_step_end: bool) -> None:
        """Give this rank's state to the joining ranks that have asked for it, and its second part to those in step."""
        source, in_step = self._world.state_source, self._world.is_in_step
        if joining := source.asked_by(self._engine.step, at_step_end=at_step_end):
            if self._engine.exchanges.algorithm.before_forward:
                self._engine.combine_all()  # what the rank takes over is what this one's next forward pass reads
            source.give(
                joining,
                lambda room: serialize(self._state() | ({} if in_step else {"second": self._second_part()}), room),
            )
        if not in_step:
            return

        def second(room: Callable[[int], torch.Tensor]) -> tuple[str, torch.Tensor]:
            if not (at_step_end or self._world.member in self._world.consensus.latest.members):
                raise ExchangeError("it leaves, and has not taken part in what the others have done before this step")
            return serialize(self._second_part(), room)

        if joining := source.begun(self.generation.members, returning=at_step_end):
            source.give(joining, second, is_second=True)

    @property
    def _step(self) -> int:
        """The step by which the ranks agree on generations; always 0 if they do not make their steps together."""
        return self._engine.step if self._world.is_in_step else 0

    def _record_members(self) -> None:
        fallback, number = self._arguments.fallback_topology, self.generation.number
        num_buckets = len(self._engine.exchanges.in_flight)
        self._world.record(Members(self._world.member, self._engine.step, number, self.members, fallback, num_buckets))

    def end(self) -> None:
        """Note in the recording that the model is closed. Local."""
        self._world.record(Ended(self._world.member, self._engine.step))

    def catch_up(self) -> None:
        """Exchange along the topology of the newest generation that can begin with this collective operation. Local."""
        self._follow(self._world.consensus.newest_that_begins(self._world.generation.number))

    def leave(self) -> None:
        """Tell the others, and make the steps that they still make with this rank, without updates. Local."""
        last = self._world.consensus.leave()
        training_store.leave()
        with self._engine.exchanges.updating(0.0):
            while last is not None and self._engine.step < last:
                self._engine.end_step()

    def _join(self) -> Callable[[], None]:
        """Become a rank of a running training, with the parameters and the optimizer's state of one of its ranks.

        A rank in its loop, at the end of a step, returns; any other joins before its loop, also if it was a member
        before. Once it has entered its first step, it must call the function that this method returns, which takes the
        rest of the state.
        """
        world, engine = self._world, self._engine
        check_manifest(world.published(), self._parts.manifest, world.member)
        joining_rank, generation = JoiningRank(world, returns=self._is_in_loop), None
        patience_s = _PATIENCE_TIMEOUTS * world.timeout.total_seconds()
        deadline = time.monotonic() + patience_s
        while generation is None:
            source, text, copied = joining_rank.take_state()
            try:
                state = deserialize(text, copied.values, copied.release)
                for names in state["unfrozen"]:
                    engine.unfreeze(names)
                restore_replica(engine, self._parts.optimizers, state)
            except Exception as error:
                raise CannotJoinError(
                    f"rank {world.member}: joining: what rank {source} gave cannot be loaded here: {reason(error)}"
                ) from error
            engine.group.changed()
            self._has_common_state = False  # it is from an earlier step
            given_at = self._joined_at = engine.step
            world.record(Joined(world.member, given_at, source))
            num_loaded, step, num_ended = state["position"]
            world.consensus.position = num_loaded, step, num_ended
            second = state.get("second")
            del copied, state  # it may take some steps to be admitted
            generation = joining_rank.be_admitted(source, self._check_size)
            if generation is None:
                if time.monotonic() > deadline:
                    raise ExchangeError(
                        f"rank {world.member}: joining: whenever this rank asked within {patience_s:g} s, the others "
                        "were in a collective operation, or had completed one since this rank was given its state, or "
                        "had lost the rank that gave it"
                    )
                time.sleep(_PAUSE_S)  # each attempt delays the others for a moment
        if world.is_in_step:
            engine.step = generation.first_step
        self.generation, self.rank = Generation(-1, tuple(world.group_of(world.member))), 0
        logger.info(
            "rank {}: joins at step {}, with what rank {} had at step {}", world.member, engine.step, source, given_at
        )
        return partial(self._end_joining, source, second)

    def _end_joining(self, source: int, second: dict[str, Any] | None) -> None:
        """Take the second part of the state of ``source``, if it is not ``second``.

        Nobody can take the place of a source that is lost: the others record nothing for this rank, and are further
        when their loss of it is known; and an average over time is that of the source's own parameters. How many
        collective operations the others have ended in this step is not known then either. So this rank joins anew.
        """
        world, engine = self._world, self._engine
        who = f"rank {world.member}: rank {source}, whose state it takes,"
        if second is None:
            try:
                text, copied = take_second_part(world.mesh, source)
                second = deserialize(text, copied.values, copied.release)
                if second["step"] != engine.step:
                    raise ExchangeError(f"{who} gave what it keeps at step {second['step']}, not {engine.step}")
            except CannotJoinError:
                raise
            except ExchangeError as error:
                raise ExchangeError(f"{who} did not give the last part of it: {error}") from error
            world.consensus.position = tuple(second["position"])  # as if it had taken part in what the others did
        for names in second["unfrozen"]:  # the others may have unfrozen more since the first part
            engine.unfreeze(names)
        engine.frozen.load_state_dict(second["frozen"])
        if engine.updater.scaler is not None:
            engine.updater.scaler.load_state_dict(second["scaler"], self._parts.optimizers)
        self._kept.given = GivenObjects(who, second["states"], second["options"], self._parts.optimizers)
        if self._is_in_loop:
            self._kept.given.load(self._kept)
            self._kept.end_joining()

    def _check_size(self, world_size: int) -> None:
        """Raise CannotJoinError if so many ranks could not train: once this one is admitted, all would have to end."""
        try:
            self._plan(world_size)
        except Exception as error:
            raise CannotJoinError(
                f"rank {self._world.member}: joining: with it the ranks would be {world_size}, which cannot train "
                f"together: {reason(error)}"
            ) from error

    def _come_back(self, lost: ExchangeError) -> Callable[[], None]:
        """Join the ranks that continued without this one, as soon as they can be reached.

        Returns what :meth:`_join` does.
        """
        limit_s, engine, world = self._arguments.partition_timeout_s, self._engine, self._world
        astray, self._astray = self._astray, None
        if limit_s is None and astray is not None and world.group_size == 1:
            limit_s = _PATIENCE_TIMEOUTS * world.timeout.total_seconds()
        if limit_s is None:
            raise lost
        logger.warning("{}; this rank tries to rejoin them, without training, for at most {:g} s", lost, limit_s)
        deadline = time.monotonic() + limit_s
        world.consensus.fail(lost)  # it must not propose that the others have gone
        world.mesh.cut_all("this rank is about to rejoin")
        engine.drop_in_flight()
        engine.on_step_end = do_nothing
        while True:
            try:
                world.come_back()
                end_joining = self._join()
                break
            except (ExchangeError, RuntimeError) as error:  # the latter if a store cannot be reached
                is_final = isinstance(error, CannotJoinError | ManifestError)
                if is_final or time.monotonic() > deadline:
                    given = "partition_timeout=" if self._arguments.partition_timeout_s is not None else ""
                    within = "" if is_final else f" within {given}{limit_s:g} s"
                    kind = CannotJoinError if isinstance(error, CannotJoinError) else ExchangeError
                    raise kind(f"{lost}; this rank could not rejoin them{within}: {error}") from error
            time.sleep(_PAUSE_S)
        engine.on_step_end = self.begin_step
        engine.rank = world.member
        return end_joining

    def _state(self) -> dict[str, Any]:
        """Return the state that a joining rank takes over; nothing specific to edges or to this rank's data."""
        engine = self._engine
        named = list(named_parameters(engine.module))
        return {
            **module_state(engine),
            "gradients": {},
            "optimizers": [optimizer_state(each, named, is_given=True) for each in self._parts.optimizers],
            "engine": {
                "step": engine.step,
                "samples": engine.exchanges.samples,
                "frozen": engine.frozen.state_dict(),
                "algorithm": algorithm_state(engine.exchanges, for_joining=True),
            },
            "unfrozen": [list(names) for names in engine.unfrozen],
            "position": list(self._world.consensus.position),
        }

    def _second_part(self) -> dict[str, Any]:
        """Return the state that must be of the very step from which on a rank trains."""
        scaler = self._engine.updater.scaler
        return {
            "step": self._engine.step,
            "position": list(self._world.consensus.position),
            "states": self._kept.states(),
            "options": group_options(self._parts.optimizers),
            "scaler": None if scaler is None else scaler.state_dict(),
            "unfrozen": [list(names) for names in self._engine.unfrozen],
            "frozen": self._engine.frozen.state_dict(),
        }

    def _follow(self, generation: Generation) -> None:
        if generation.number <= self.generation.number:
            return
        if self._world.consensus.ends_at is not None and generation.members == self.generation.members:
            self.generation = generation
            self._agree()  # some may not have, in the generation before
            return
        members = self._world.holding_shard(generation.members)
        topology, algorithm = self._plan(len(members))
        algorithm.follow(self._engine.exchanges.algorithm)
        schedule = algorithm.schedule(topology)
        transport: Transport | None = None
        if len(members) > 1:
            transport = make_generation_transport(
                self._world,
                schedule,
                algorithm=algorithm,
                compression=self._parts.compression,
                soft_deadline_s=self._arguments.soft_deadline_s,
                members=members,
                before=self._engine.exchanges.transport,
            )
        self.rank = members.index(self._world.member)
        self._engine.move(schedule, transport, algorithm, self.rank)
        self._engine.group.changed()
        before, self.generation = self.generation, generation
        gone = {*before.members} - {*generation.members}
        self._world.mesh.forget(lambda member, key: member in gone and key.kind == Kind.MESSAGE)
        self._engine.generation = generation.number
        self._record_members()
        self._agree()
        self._tell(before, topology)
        if (model := self._model()) is not None:
            model.topology, model.algorithm = topology, algorithm

    def _agree(self) -> None:
        """Agree with the other members of the new generation on what the algorithm keeps alike on all ranks."""
        common = common_state(self._engine.exchanges)
        is_latest = self._world.generation.number == self.generation.number
        is_shared = bool(common) and is_latest and len(self.members) > 1
        if is_shared and agree_on_(self._world, common, is_joining=not self._has_common_state):
            self._has_common_state = True
            self._world.record(Agreed(self._world.member, self._engine.step, self.generation.number))

    def _plan(self, world_size: int) -> tuple[Topology, Algorithm]:
        """Return the topology and the algorithm bound to it by which so many ranks exchange."""
        topology, fallback = self._parts.topology, self._arguments.fallback_topology
        bound = partial(
            prepare_algorithm,
            resolve_algorithm(self._arguments.algorithm),
            compression=self._parts.compression,
            optimizers=self._parts.optimizers,
            averages_buffers=self._arguments.buffers == "average",
        )

        def tell(error: Exception) -> None:
            if self._world.member == self._world.generation.members[0]:
                text = "topology {} cannot serve {} ranks, which {} does from here on ({})"
                logger.warning(text, topology.name, world_size, fallback, error)

        return resized_or(fallback, topology, world_size, bound, tell)

    def _tell(self, before: Generation, topology: Topology) -> None:
        if self._world.member != self.generation.members[0]:
            return
        mesh = self._world.mesh
        gone = [member for member in before.members if member not in self.generation.members]
        said = {*self.generation.left, *mesh.left}
        lost = [f"rank {member}: {mesh.lost.get(member, 'given up')}" for member in gone if member not in said]
        left = [f"rank {member}" for member in gone if member in said]
        joined = [f"rank {member}" for member in self.generation.members if member not in before.members]
        changes = {"lost": lost, "left": left, "joined": joined}
        what = "; ".join(f"{how}: {', '.join(who)}" for how, who in changes.items() if who)
        units = "ranks" if self._world.group_size == 1 else "shard groups"
        logger.log(
            "WARNING" if lost else "INFO",
            f"step {self._engine.step}: {len(self.members)} {units} continue, "
            f"{in_words(self.generation.members)}, with topology {topology.name}; {what}",
        )


@torch.no_grad()
def agree_on_(world: ElasticWorld, tensors: Sequence[torch.Tensor], *, is_joining: bool) -> bool:
    """Set tensors to their mean over the ranks that have trained, the same bits on all members of a new generation.

    In exact arithmetic this changes nothing, unless a rank was lost in an exchange that was to be exact, which left
    different means on different ranks; ranks that join get what the others have. Collective, when a generation is
    entered.

    Tensors of a rank that ``is_joining`` do not count: it has not trained with the others yet. Returns False if a rank
    was lost meanwhile, so that there will be another generation, or this rank cannot continue; then nothing is set
    here: each rank has recorded whether it has agreed, on all tensors or on none.
    """
    own = world.member
    agreed: list[torch.Tensor] = []
    others = [member for member in world.members if member != own]
    try:
        heads = world.exchange(dict.fromkeys(others, torch.tensor([is_joining])), _AGREEING, turn=1)
        joining = {member for member in others if heads[member].any()} | ({own} if is_joining else set())
        trained = [member for member in world.members if member not in joining] or list(world.members)
        partners = [member for member in trained if member != own]
        for number, tensor in enumerate(tensors):
            means: dict[int, torch.Tensor] = {}
            slices = dict(zip(trained, tensor.cpu().view(-1).tensor_split(len(trained)), strict=True))
            if own in trained:  # and computes the mean of one slice for all
                sent, num_bytes = {m: slices[m] for m in partners}, dict.fromkeys(partners, slices[own].nbytes)
                found = world.exchange(sent, _AGREEING, partners, num_bytes=num_bytes, turn=2 + 2 * number)
                rows = [slices[own], *(found[member].view(tensor.dtype) for member in partners)]
                means[own] = torch.stack(rows).double().mean(0).to(tensor.dtype)
            given = dict.fromkeys(others if means else (), means.get(own))
            num_bytes = {member: slices[member].nbytes for member in partners}
            found = world.exchange(given, _AGREEING, partners, num_bytes=num_bytes, turn=3 + 2 * number)
            means |= {member: payload.view(tensor.dtype) for member, payload in found.items()}
            agreed.append(torch.cat([means[member] for member in trained]).view(tensor.shape))
    except (GenerationEndedError, ExchangeError):  # a rank that cannot continue learns so again when it begins a step
        return False
    for tensor, mean in zip(tensors, agreed, strict=True):
        tensor.copy_(mean)
    return True
