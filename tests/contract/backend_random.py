"""Collectives drawn by chance, over popdist and over gloo, on ranks that come when chance has them come.

All ranks draw the same calls from one seed. Each rank draws for itself how late it is, whether it waits at once,
and in what memory its tensors lie. What is brought are small whole numbers, so each rank knows what must come out,
in every dtype. Then the same calls are made over gloo, with plain tensors: gloo checks what is held to be right,
and may not do a call that popdist refuses, unless that was for strides, where gloo would answer wrong numbers.

More calls than the tests make (a letter for each rank says on which host it is):

    python -m tests.contract.backend_random --num-ranks 4 --num-calls 2000 --hosts aabb SEED...
"""

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

import popdist
from popdist.ground.contract import SHARE_TENSORS
from tests.contract.forked_ranks import Rank, run_ranks
from tests.torch_names import VERSION, all_gather_single, named, reduce_scatter_single

NUM_CALLS = 250
"""Of the tests, at each number of ranks."""

HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
UNUSUAL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.float64, torch.float32, *HALVES, *WHOLE, *COMPLEX, *UNUSUAL)

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.sum(0) / len(rows),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "BAND": partial(reduce, torch.bitwise_and),
    "BOR": partial(reduce, torch.bitwise_or),
    "BXOR": partial(reduce, torch.bitwise_xor),
}
OF_POPDIST = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
OF_COMPLEX = ("SUM", "AVG", "PRODUCT")
OF_NCCL = "PREMUL_SUM"

SIZES = (0, 1, 3, 7, 64, 65, 1000)
MOST_ELEMENTS = 20_000
LARGE = (65_536, 140_000)
"""Elements of what is combined in place, and of what goes in pieces otherwise."""

LARGE_SHARE = 0.08
SHARING = -1
"""The group that may move tensors that come again."""

DENSE_KINDS = ("torch's", "shared", "again")
KINDS = (*DENSE_KINDS, "gaps", "turned", "expanded", "negative", "conjugate")
"""Memory that tensors lie in; see :meth:`Player.brought`."""

EVEN_SHARE, ASYNC_SHARE, DENSE_SHARE = 0.3, 0.3, 0.5
MOST_PENDING = 6
DELAYED, LONG_DELAYED = 0.15, 0.01
DELAY_SECONDS, LONG_DELAY_SECONDS = 0.0002, 0.003

STRIDED = ("contiguous", "view_as_real")
"""In the words of popdist, and of torch's collectives, that refuse a tensor for the memory that it lies in."""

REFUSALS = (RuntimeError, ValueError, TypeError)
"""What a call that is not possible raises, at once or where it is waited for."""

MOST_SHOWN = 5

Answer = Exception | str
"""What came of a call on this rank: a refusal, or what is wrong with its results; nothing for right ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, the same on every rank.

    Attributes:
        number: Which one it is.
        name: Of a function below, without ``call_``.
        group: Which group it is made in.
        op: For those that reduce.
        dtype: Of what is brought.
        size: Length of the first dimension of what is brought, for each rank where it is dealt out.
        width: Length of the second dimension.
        is_even: Whether all numbers that a member brings are the same one.
        root: A member, for those that have one.
        kind: What memory all bring where gloo does the call; elsewhere each rank draws its own.
    """

    number: int
    name: str
    group: int
    op: str
    dtype: torch.dtype
    size: int
    width: int
    is_even: bool
    root: int
    kind: str

    @property
    def is_averaged_whole(self) -> bool:
        """Whether it is a mean of whole numbers, which no backend makes."""
        return self.op == "AVG" and self.dtype in WHOLE

    @property
    def is_gloos(self) -> bool:
        """Whether gloo does it, also over popdist, and may refuse some memory: then on all ranks, or none."""
        is_unusual = self.op not in OF_POPDIST or self.dtype in UNUSUAL or self.is_averaged_whole
        is_dealt = self.name in ("scatter", "gather")
        return is_dealt or self.dtype in COMPLEX or ("reduce" in self.name and is_unusual)

    @property
    def is_message(self) -> bool:
        """Whether it is sent from one rank to another."""
        return self.name in ("send_recv", "messages")

    @property
    def is_wrong_over_gloo(self) -> bool:
        """Whether gloo has another answer: it adds the bytes of bools, and rounds halves at each step."""
        return self.is_added_by_gloo or ("reduce" in self.name and self.dtype in (torch.bool, *HALVES))

    @property
    def is_added_by_gloo(self) -> bool:
        """Whether gloo adds, and asks for no other operation: one tensor that is scattered, before torch 2.11."""
        return VERSION < (2, 11) and self.name == "reduce_scatter_single" and self.op != "SUM"


def drawn(seed: int, num_calls: int, members: Sequence[Sequence[int]]) -> list[Call]:
    """The calls of a seed, in groups with these members."""
    draw = random.Random(seed)  # noqa: S311 - the same on all ranks
    calls = []
    for number in range(num_calls):
        is_large = draw.random() < LARGE_SHARE
        group = SHARING if is_large else draw.randrange(len(members))
        call = Call(
            number=number,
            name=draw.choice(sorted(NAMED)),
            group=group,
            op=draw.choice((*OF_POPDIST, *OPERATIONS, OF_NCCL)),
            dtype=draw.choice(DTYPES),
            size=draw.choice(LARGE if is_large else (*SIZES, draw.randrange(MOST_ELEMENTS))),
            width=1 if is_large else draw.choice((1, 1, 2, 3)),
            is_even=draw.random() < EVEN_SHARE,
            root=draw.choice(members[group]),
            kind=draw.choice(DENSE_KINDS if draw.random() < DENSE_SHARE else KINDS),
        )
        calls.append(call)
    return calls


def row(call: Call, member: int, length: int, part: int = 0) -> Tensor:
    """What a member brings, as ``length`` rows of the call's width in a dtype that holds every result, too."""
    salt = (31 * member + call.number + 17 * part) % 1009 * 13
    steps = torch.arange(length * call.width) * (0 if call.is_even else 7)
    numbers = ((steps + salt) % 10).view(length, call.width)
    if call.dtype == torch.bool:
        return numbers % 2
    if call.dtype.is_complex:
        return torch.complex(numbers.double(), ((numbers * 3 + salt) % 7).double())
    return numbers.double() if call.dtype.is_floating_point else numbers


def reduced(call: Call, rows: Tensor) -> list[Tensor] | None:
    """What must come out of the members' rows; None if there is no such operation."""
    if call.op == OF_NCCL or call.is_averaged_whole or (call.dtype.is_complex and call.op not in OF_COMPLEX):
        return None
    if call.op.startswith("B") and call.dtype.is_floating_point:
        return None
    return [OPERATIONS[call.op](rows).to(call.dtype)]


def is_same(found: Any, wanted: Any) -> bool:
    """Whether these are equal, tensors in dtype, too."""
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(is_same, found, wanted))
    if not isinstance(wanted, Tensor):
        return bool(found == wanted)
    if found.dtype != wanted.dtype:
        return False
    if found.is_complex():
        return torch.allclose(found.flatten(), wanted.flatten())  # gloo rounds their means otherwise
    wide = torch.float64 if found.is_floating_point() else torch.int64  # torch compares no unusual ones
    return torch.equal(found.to(wide).flatten(), wanted.to(wide).flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call was begun with.

    Attributes:
        works: To wait for; None for what is done.
        found: Where the results are, when the call is done.
        wanted: What they must be; None if there is no right answer.
    """

    works: Sequence[distributed.Work | None] = ()
    found: Sequence[Any] = ()
    wanted: Sequence[Any] | None = ()


class Player:
    """Makes the calls of one rank over one backend, and keeps what came of them in ``answers``, by their numbers.

    Where ``is_plain`` it draws nothing: it waits at once, with contiguous tensors.
    """

    def __init__(
        self, rank: int, members: Sequence[Sequence[int]], groups: Sequence[Any], *, is_plain: bool
    ) -> None:
        self.rank = rank
        self.members = members
        self.groups = groups
        self.is_plain = is_plain
        self.has_messages = getattr(groups[0], "host_group", None) is not None  # in the memory of the host
        self.answers: dict[int, Answer] = {}
        self._draw = random.Random()  # noqa: S311 - of the call that is made
        self._num_brought = 0  # for the call
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._pending: list[tuple[Call, Outcome]] = []

    def play(self, calls: Sequence[Call]) -> None:
        """Every call of a group that this rank is in, perhaps late, and perhaps with a wait for one before it."""
        for call in calls:
            if self.rank not in self.members[call.group]:
                continue
            self._num_brought = 0
            self._draw.seed(f"{call} {self.rank}")
            chance = self._draw.random()
            if chance < DELAYED and not self.is_plain:
                seconds = LONG_DELAY_SECONDS if chance < LONG_DELAYED else DELAY_SECONDS
                time.sleep(self._draw.uniform(0, seconds))
            try:
                self._pending.append((call, NAMED[call.name](self, call)))
            except REFUSALS as error:
                self.answers[call.number] = error
                continue
            if not any(self._pending[-1][1].works):
                self._wait(len(self._pending) - 1)
            if len(self._pending) > self._draw.randrange(MOST_PENDING):
                self._wait(self._draw.randrange(len(self._pending)))
        while self._pending:
            self._wait(0)

    def _wait(self, which: int) -> None:
        call, outcome = self._pending.pop(which)
        try:
            for work in outcome.works:
                if work is not None:
                    work.wait()
        except REFUSALS as error:
            self.answers[call.number] = error
            return
        is_right = outcome.wanted is not None and is_same(outcome.found, outcome.wanted)
        self.answers[call.number] = "" if is_right else f"{outcome.found}, not {outcome.wanted}"

    def is_async(self) -> bool:
        """Whether this rank waits later; drawn each time."""
        return not self.is_plain and self._draw.random() < ASYNC_SHARE

    def ranks(self, call: Call) -> Sequence[int]:
        """Those of the group."""
        return self.members[call.group]

    def place(self, call: Call) -> int:
        """This rank's place in the group."""
        return self.ranks(call).index(self.rank)

    def rows(self, call: Call, length: int, part: int = 0) -> Tensor:
        """What all members bring, in their order."""
        return torch.stack([row(call, member, length, part) for member in self.ranks(call)])

    def mine(self, call: Call, length: int, part: int = 0, *, is_written: bool = False) -> Tensor:
        """What this rank brings."""
        return self.brought(row(call, self.rank, length, part), call, is_written=is_written)

    def empty(self, call: Call, length: int) -> Tensor:
        """Memory of some kind for a result."""
        return self.brought(torch.ones_like(row(call, 0, length)), call, is_written=True)

    def brought(self, values: Tensor, call: Call, *, is_written: bool) -> Tensor:
        """These numbers in memory of some kind, in which each has its own place if it ``is_written``."""
        dtype, shape = call.dtype, values.shape
        self._num_brought += 1
        kind = self._kind(call, is_written=is_written or not values.numel())
        if kind == "shared" and values.numel():
            return popdist.shared_empty(*shape, dtype=dtype).copy_(values)
        if kind == "again" and not self._pending:
            key = (dtype, *shape, self._num_brought)
            return self._kept.setdefault(key, torch.empty(shape, dtype=dtype)).copy_(values)
        if kind == "gaps":
            return torch.empty(shape[0], 2, *shape[1:], dtype=dtype)[:, 0].copy_(values)
        if kind == "turned":
            return torch.empty(shape[::-1], dtype=dtype).T.copy_(values)
        if kind == "expanded":
            return values[:1, :1].to(dtype).expand(shape)
        if kind == "negative" and dtype in (torch.float64, torch.float32):
            return torch.complex(torch.zeros(shape, dtype=dtype), -values.to(dtype)).conj().imag
        if kind == "conjugate" and dtype.is_complex:
            return values.to(dtype).conj().resolve_conj().conj()
        return values.to(dtype).clone()

    def _kind(self, call: Call, *, is_written: bool) -> str:
        is_gloos = not self.has_messages if call.is_message else call.is_gloos
        kind = call.kind if is_gloos else self._draw.choice(KINDS)
        if kind == "expanded" and (is_gloos or is_written or not call.is_even):
            kind = "gaps"
        # where one of several is refused, the others are left over: gloo refuses strides, and torch conjugates
        is_refused = call.is_message and (kind == "conjugate" or (is_gloos and call.name == "messages"))
        return "torch's" if is_refused or self.is_plain else kind


def operation(call: Call) -> Any:
    """The operation as torch has it."""
    return getattr(ReduceOp, call.op)


def call_all_reduce(player: Player, call: Call) -> Outcome:
    """Everyone has what all brought, combined."""
    tensor, wanted = player.mine(call, call.size, is_written=True), reduced(call, player.rows(call, call.size))
    work = distributed.all_reduce(tensor, operation(call), player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=[tensor], wanted=wanted)


def call_all_reduce_coalesced(player: Player, call: Call) -> Outcome:
    """Several tensors in one call."""
    lengths = list(enumerate((call.size, 3, 0)))
    tensors = [player.mine(call, length, part, is_written=True) for part, length in lengths]
    wanted = [reduced(call, player.rows(call, length, part)) for part, length in lengths]
    opts: Any = distributed.AllreduceCoalescedOptions()
    opts.reduceOp = operation(call)
    if hasattr(opts, "asyncOp"):  # not in torch 2.6
        opts.asyncOp = player.is_async()
    work = player.groups[call.group].allreduce_coalesced(tensors, opts)
    return Outcome(works=[work], found=tensors, wanted=[it[0] for it in wanted if it] or None)


def call_reduce(player: Player, call: Call) -> Outcome:
    """The root has it."""
    tensor, wanted = player.mine(call, call.size, is_written=True), reduced(call, player.rows(call, call.size))
    group = player.groups[call.group]
    work = distributed.reduce(tensor, call.root, operation(call), group, player.is_async())
    if player.rank != call.root:
        return Outcome(works=[work], wanted=wanted and [])
    return Outcome(works=[work], found=[tensor], wanted=wanted)


def call_broadcast(player: Player, call: Call) -> Outcome:
    """Everyone has the root's."""
    tensor = player.mine(call, call.size, is_written=True)
    work = distributed.broadcast(tensor, call.root, player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=[tensor], wanted=[row(call, call.root, call.size).to(call.dtype)])


def call_all_gather(player: Player, call: Call) -> Outcome:
    """Everyone has everything, in a list."""
    found, mine = [player.empty(call, call.size) for _ in player.ranks(call)], player.mine(call, call.size)
    work = distributed.all_gather(found, mine, player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=found, wanted=list(player.rows(call, call.size).to(call.dtype)))


def call_all_gather_single(player: Player, call: Call) -> Outcome:
    """Everyone has everything, in one tensor."""
    rows = player.rows(call, call.size)
    whole, mine = player.empty(call, call.size * len(rows)), player.mine(call, call.size)
    work = all_gather_single(whole, mine, player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=[whole], wanted=[rows.to(call.dtype)])


def call_all_gather_coalesced(player: Player, call: Call) -> Outcome:
    """Everyone has everything of several tensors."""
    num_members, lengths = len(player.ranks(call)), list(enumerate((call.size, 2)))
    wholes = [player.empty(call, length * num_members) for _, length in lengths]
    mine = [player.mine(call, length, part) for part, length in lengths]
    work = named(player.groups[call.group], "all_gather_single_coalesced")(wholes, mine)
    wanted = [player.rows(call, length, part).to(call.dtype) for part, length in lengths]
    return Outcome(works=[work], found=wholes, wanted=wanted)


def call_reduce_scatter(player: Player, call: Call) -> Outcome:
    """Each has its part of what all brought, combined; from lists."""
    mine = [player.mine(call, call.size, part) for part in range(len(player.ranks(call)))]
    found, wanted = player.empty(call, call.size), reduced(call, player.rows(call, call.size, player.place(call)))
    group = player.groups[call.group]
    work = distributed.reduce_scatter(found, mine, operation(call), group, player.is_async())
    return Outcome(works=[work], found=[found], wanted=wanted)


def call_reduce_scatter_single(player: Player, call: Call) -> Outcome:
    """The same, from one tensor."""
    length, start = call.size * len(player.ranks(call)), call.size * player.place(call)
    found, mine = player.empty(call, call.size), player.mine(call, length)
    wanted = reduced(call, player.rows(call, length)[:, start : start + call.size])
    group = player.groups[call.group]
    work = reduce_scatter_single(found, mine, operation(call), group, player.is_async())
    return Outcome(works=[work], found=[found], wanted=wanted)


def sent_length(call: Call, source: int, target: int) -> int:
    """How much ``source`` sends to ``target`` where parts have their own lengths."""
    return (call.size + 3 * source + 5 * target) % (call.size + 1)


def call_all_to_all(player: Player, call: Call) -> Outcome:
    """Each has a part of everyone's, in lists of parts with lengths of their own."""
    me, others = player.rank, player.ranks(call)
    sent = [player.mine(call, sent_length(call, me, other), other) for other in others]
    found = [player.empty(call, sent_length(call, other, me)) for other in others]
    wanted = [row(call, other, sent_length(call, other, me), me).to(call.dtype) for other in others]
    work = distributed.all_to_all(found, sent, player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=found, wanted=wanted)


def call_all_to_all_single(player: Player, call: Call) -> Outcome:
    """The same, in one tensor, which torch cuts; or in equal parts, where no lengths are told."""
    me, others, is_equal = player.place(call), player.ranks(call), call.number % 2 == 0
    lengths = [[call.size if is_equal else sent_length(call, one, other) for other in others] for one in others]
    received = [sent[me] for sent in lengths]
    wholes = [row(call, other, sum(sent)) for other, sent in zip(others, lengths, strict=True)]
    wanted = [whole.split(sent)[me] for whole, sent in zip(wholes, lengths, strict=True)]
    found, mine = player.empty(call, sum(received)), player.mine(call, sum(lengths[me]))
    work = distributed.all_to_all_single(
        found,
        mine,
        output_split_sizes=None if is_equal else received,
        input_split_sizes=None if is_equal else lengths[me],
        group=player.groups[call.group],
        async_op=player.is_async(),
    )
    return Outcome(works=[work], found=[found], wanted=[torch.cat(wanted).to(call.dtype)])


def call_gather(player: Player, call: Call) -> Outcome:
    """The root has everything."""
    rows, is_root = player.rows(call, call.size).to(call.dtype), player.rank == call.root
    found, mine = [player.empty(call, call.size) for _ in rows] if is_root else None, player.mine(call, call.size)
    work = distributed.gather(mine, found, call.root, player.groups[call.group], player.is_async())
    return Outcome(works=[work], found=found or [], wanted=list(rows) if is_root else [])


def call_scatter(player: Player, call: Call) -> Outcome:
    """Each has a part of the root's."""
    others, is_root = player.ranks(call), player.rank == call.root
    found = player.empty(call, call.size)
    mine = [player.mine(call, call.size, other) for other in others] if is_root else None
    work = distributed.scatter(found, mine, call.root, player.groups[call.group], player.is_async())
    return Outcome(
        works=[work], found=[found], wanted=[row(call, call.root, call.size, player.rank).to(call.dtype)]
    )


def call_send_recv(player: Player, call: Call) -> Outcome:
    """Each sends to the next one of the group, and the last one to the first."""
    others, place, group, tag = player.ranks(call), player.place(call), player.groups[call.group], call.number % 5
    if len(others) == 1:
        return Outcome()
    sent, received = player.mine(call, call.size), player.empty(call, call.size)
    works = [
        distributed.irecv(received, others[place - 1], group, tag),  # first: a refused one may leave nothing sent
        distributed.isend(sent, others[(place + 1) % len(others)], group, tag),
    ]
    return Outcome(works=works, found=[received], wanted=[row(call, others[place - 1], call.size).to(call.dtype)])


def call_messages(player: Player, call: Call) -> Outcome:
    """Each sends several to the next one, and receives those of one tag before those of the other."""
    others, place, group = player.ranks(call), player.place(call), player.groups[call.group]
    if len(others) == 1:
        return Outcome()
    source, target, tags = others[place - 1], others[(place + 1) % len(others)], (10, 11)
    lengths = list(enumerate((call.size, 3, 0, 1)))
    mine = [player.mine(call, length, part) for part, length in lengths]
    order = sorted(lengths, key=lambda it: (it[0] + call.number) % 2)
    found = [player.empty(call, length) for _, length in order]
    works = [
        distributed.irecv(it, source, group, tags[part % 2]) for it, (part, _) in zip(found, order, strict=True)
    ]
    works += [distributed.isend(it, target, group, tags[part % 2]) for part, it in enumerate(mine)]
    wanted = [row(call, source, length, part).to(call.dtype) for part, length in order]
    return Outcome(works=works, found=found, wanted=wanted)


def call_barrier(player: Player, call: Call) -> Outcome:
    """Nobody goes on alone."""
    return Outcome(works=[distributed.barrier(player.groups[call.group], player.is_async())])


def objects(call: Call, member: int) -> list[Any]:
    """What a member brings that is no tensor; of its own length."""
    return [{"from": member, "numbers": list(range((call.size + member) % 50))}, "x" * member, call.dtype]


def call_broadcast_objects(player: Player, call: Call) -> Outcome:
    """Everyone has the root's."""
    found = objects(call, player.rank)
    distributed.broadcast_object_list(found, call.root, player.groups[call.group])
    return Outcome(found=found, wanted=objects(call, call.root))


def call_all_gather_objects(player: Player, call: Call) -> Outcome:
    """Everyone has everything."""
    found: list[Any] = [None for _ in player.ranks(call)]
    distributed.all_gather_object(found, objects(call, player.rank), player.groups[call.group])
    return Outcome(found=found, wanted=[objects(call, member) for member in player.ranks(call)])


def call_gather_objects(player: Player, call: Call) -> Outcome:
    """The root has everything."""
    found: list[Any] | None = [None for _ in player.ranks(call)] if player.rank == call.root else None
    distributed.gather_object(objects(call, player.rank), found, call.root, player.groups[call.group])
    wanted = [objects(call, member) for member in player.ranks(call)] if found else []
    return Outcome(found=found or [], wanted=wanted)


def call_scatter_objects(player: Player, call: Call) -> Outcome:
    """Each has a part of the root's."""
    found: list[Any] = [None]
    mine = [objects(call, member) for member in player.ranks(call)] if player.rank == call.root else None
    distributed.scatter_object_list(found, mine, call.root, player.groups[call.group])
    return Outcome(found=found, wanted=[objects(call, player.rank)])


NAMED: dict[str, Callable[[Player, Call], Outcome]] = {
    name.removeprefix("call_"): fn for name, fn in list(globals().items()) if name.startswith("call_")
}


def problem(call: Call, ours: Answer, gloos: Answer) -> str:
    """What is wrong with popdist's answer, or with gloo's; nothing if both are right, or refuse."""
    if isinstance(ours, str) and ours:
        return f"{call}: popdist has {ours}"
    if isinstance(gloos, str) and gloos and not call.is_wrong_over_gloo:
        return f"{call}: gloo has {gloos}"
    is_for_strides = (call.is_gloos or call.is_message) and any(word in str(ours) for word in STRIDED)
    is_right_to_refuse = is_for_strides or call.is_added_by_gloo
    if isinstance(ours, Exception) and isinstance(gloos, str) and not is_right_to_refuse:
        return f"{call}: popdist refuses, and gloo does not: {ours!r}"
    return ""


def play(rank: Rank, seed: int, num_calls: int) -> None:
    """Make the calls of a seed over popdist, and then over gloo."""
    warnings.simplefilter("ignore")  # of functions that torch would have called by newer names
    everyone = list(range(rank.num_ranks))
    members = [everyone, everyone, everyone[1:] or everyone, everyone]
    groups: list[Any] = [distributed.new_group(ranks) for ranks in members[:SHARING]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARE_TENSORS, "1")
        groups.append(distributed.new_group(everyone))
    part = distributed.new_group(members[2], backend="gloo")
    gloo_groups = [rank.gloo, rank.gloo, part, rank.gloo]

    calls = drawn(seed, num_calls, members)
    drawing = Player(rank.rank, members, groups, is_plain=False)
    drawing.play(calls)
    distributed.barrier()
    plain = Player(rank.rank, members, gloo_groups, is_plain=True)
    # gloo's own barrier raises, on some ranks, the error of a call before it that all ranks were refused
    plain.play([call for call in calls if call.name != "barrier"])
    distributed.barrier()
    answers = ((call, drawing.answers.get(call.number, ""), plain.answers.get(call.number, "")) for call in calls)
    wrong = [text for call, ours, gloos in answers if (text := problem(call, ours, gloos))]
    assert not wrong, "\n".join([f"seed {seed}, rank {rank.rank}: {len(wrong)} problems", *wrong[:MOST_SHOWN]])


def main() -> None:
    """Make the calls of some seeds; see the top of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-calls", type=int, default=NUM_CALLS)
    parser.add_argument("--hosts", default="")
    parser.add_argument("seeds", type=int, nargs="+")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        fn = partial(play, seed=seed, num_calls=arguments.num_calls)
        run_ranks(fn, "popdist", arguments.num_ranks, hosts=arguments.hosts)


if __name__ == "__main__":
    main()
