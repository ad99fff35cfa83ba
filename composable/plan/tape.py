"""Memory of a computation by its operators: what the forward pass makes and keeps, and what the backward pass adds.

A `Tape` is the list of operators that a part of a model runs, written once for its sizes. Played forward and backward
over a `Ledger`, it holds and frees bytes in the order in which torch's autograd does: results live until their last
reader, or until the backward pass of the operator that keeps them; gradients live until they are read; those of weights
stay.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SELF = -1
"""in `keep`: the operator's own result"""


class Ledger:
    """Bytes held now by part, and what was held when they were most."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}

    def hold(self, part: str, size: int) -> None:
        """`size` more bytes."""
        if size:
            self.now[part] = self.now.get(part, 0) + size
            self.total += size
            if self.total > self.peak:
                self.peak, self.at_peak = self.total, dict(self.now)

    def free(self, part: str, size: int) -> None:
        """`size` bytes less."""
        if size:
            self.now[part] = self.now.get(part, 0) - size
            self.total -= size

    def add(self, other: "Ledger") -> None:
        """What happened over another ledger, which began with nothing."""
        if self.total + other.peak > self.peak:
            self.peak, self.at_peak = self.total + other.peak, dict(self.now)
            for part, size in other.at_peak.items():
                self.at_peak[part] = self.at_peak.get(part, 0) + size
        for part, size in other.now.items():
            self.now[part] = self.now.get(part, 0) + size
        self.total += other.total

    def touch(self, part: str, size: int) -> None:
        """`size` bytes that are held and freed at once."""
        self.hold(part, size)
        self.free(part, size)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator; sizes in bytes."""

    part: str
    size: int
    """of its result; 0: it is a view, or lies elsewhere"""
    inputs: tuple[int, ...] = ()
    """operators whose results it reads, and gives gradients to"""
    keep: tuple[int, ...] = ()
    """operators whose results its backward pass reads; SELF: its own"""
    extra: int = 0
    """that it keeps beside results"""
    weight: int = 0
    """of the gradients of its weights"""
    forward: int = 0
    """that it needs while it runs, beside inputs and result"""
    backward: int = 0
    """that its backward pass needs while it runs, beside the gradients"""
    product: bool = False
    """its result (and `extra`) are kept by selective recomputation"""
    through: bool = False
    """its gradient is that of its inputs: no new memory"""
    enter: int | None = None
    """no operator: here unit number `enter` begins"""
    leave: int | None = None
    """no operator: here unit number `leave` ends"""


@dataclass(frozen=True)
class Segment:
    """Operators start..end - 1, whose results are computed again in the backward pass."""

    start: int
    end: int
    selective: bool
    """results of products are kept"""


@dataclass
class Tape:
    """Operators in the order of the forward pass."""

    operators: list[Operator] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def add(self, part: str, size: int, *inputs: int, keep: Sequence[int] = (), **rest: int | bool) -> int:
        """Append an operator; gives its number, by which later ones read its result."""
        number = len(self.operators)
        kept = tuple(number if each == SELF else each for each in keep)
        self.operators.append(Operator(part, size, inputs, kept, **rest))  # type: ignore[arg-type]
        return number

    def enter(self, unit: int) -> None:
        """The parameters of a unit are needed from here on."""
        self.operators.append(Operator("", 0, enter=unit))

    def leave(self, unit: int) -> None:
        """They are not needed any more before the backward pass."""
        self.operators.append(Operator("", 0, leave=unit))

    def outside(self, segment: Segment) -> set[int]:
        """Operators before a segment whose results it reads."""
        inside = self.operators[segment.start : segment.end]
        return {source for each in inside for source in (*each.inputs, *each.keep) if source < segment.start}

    @functools.cached_property
    def within(self) -> list[Segment | None]:
        """The segment that each operator is in; the tape is complete."""
        found: list[Segment | None] = [None] * len(self.operators)
        for segment in self.segments:
            found[segment.start : segment.end] = [segment] * (segment.end - segment.start)
        return found

    @functools.cached_property
    def readers(self) -> list[int]:
        """How many operators read each result in the forward pass; the tape is complete."""
        count = [0] * len(self.operators)
        for each in self.operators:
            for number in each.inputs:
                count[number] += 1
        return count

    @functools.cached_property
    def keepers(self) -> list[int]:
        """For how many reasons each result stays after the forward pass: operators that read it in the backward pass;
        of what is computed again, what it begins with, and products if it is selective; the tape is complete."""
        count = [0] * len(self.operators)
        for number, each in enumerate(self.operators):
            segment = self.within[number]
            if segment is None:
                for source in each.keep:
                    count[source] += 1
            elif segment.selective and each.product:
                count[number] += 1
        for segment in self.segments:
            for source in self.outside(segment):
                count[source] += 1
        return count


Border = Callable[[int, str], None]
"""(unit, what happens there): enter and leave in the forward pass; left and entered in the backward pass, which comes
from behind; enter again and leave again in recomputation; weights and weights done around gradients that come later"""


class Pass:
    """One micro-batch on its way through a tape, forward and then backward.

    Args:
        tape: what is run.
        ledger: where bytes are held.
        border: told where units begin and end.
        weights: (bytes) a gradient of weights is there.
    """

    def __init__(self, tape: Tape, ledger: Ledger, border: Border, weights: Callable[[int], None]) -> None:
        self.tape, self.ledger, self.border, self.weights = tape, ledger, border, weights
        self.readers, self.keepers = list(tape.readers), list(tape.keepers)
        self.alive = [False] * len(tape.operators)
        self.again = {segment.end - 1: segment for segment in tape.segments}
        self.later: list[tuple[str, int]] = []
        """(part, bytes) that are freed after the second half of the backward pass"""

    def over(self, ledger: Ledger, border: Border, weights: Callable[[int], None]) -> "Pass":
        """The same as far as it has come, over another ledger from here on; this one stays as it is."""
        other = copy.copy(self)
        other.ledger, other.border, other.weights = ledger, border, weights
        other.readers, other.keepers = list(self.readers), list(self.keepers)
        other.alive, other.later = list(self.alive), list(self.later)
        return other

    def forward(self) -> None:
        """From the first operator to the last."""
        for number in range(len(self.tape.operators)):
            self._run(number, first=True)

    def _run(self, number: int, *, first: bool) -> None:
        each, ledger = self.tape.operators[number], self.ledger
        if each.enter is not None or each.leave is not None:
            unit, what = (each.enter, "enter") if each.enter is not None else (each.leave, "leave")
            assert unit is not None
            self.border(unit, what if first else f"{what} again")
            return
        segment = self.tape.within[number]
        if not self.alive[number]:
            self.alive[number] = True
            ledger.hold(each.part, each.size)
        ledger.touch("temporary", each.forward)
        cached = segment is not None and segment.selective and each.product
        if segment is None or (not first and not cached) or (first and cached):
            ledger.hold(each.part, each.extra)
        for source in each.inputs:
            self.readers[source] -= 1
            self._drop(source)
        self._drop(number)

    def _drop(self, number: int) -> None:
        if self.alive[number] and self.readers[number] <= 0 and self.keepers[number] <= 0:
            self.alive[number] = False
            self.ledger.free(self.tape.operators[number].part, self.tape.operators[number].size)

    def _recompute(self, segment: Segment) -> None:
        operators = self.tape.operators
        inside = range(segment.start, segment.end)
        for number in inside:
            self.readers[number] = 0
        for number in inside:
            for source in operators[number].inputs:
                self.readers[source] += 1
            for source in operators[number].keep:
                self.keepers[source] += 1
            if segment.selective and operators[number].product:
                self.keepers[number] -= 1
        for number in inside:
            self._run(number, first=False)

    def backward(self, *, halves: bool = False) -> None:
        """From the last operator to the first, with a gradient that lies elsewhere.

        Args:
            halves: gradients of weights come later, in `weight_half`; until then everything is kept, and the gradients
                that weights are multiplied with.
        """
        operators = self.tape.operators
        buffers: dict[int, list[int]] = {len(operators) - 1: [0, 1]}  # operator -> [bytes, readers] of its gradient
        for number in range(len(operators) - 1, -1, -1):
            each = operators[number]
            if segment := self.again.get(number):
                self._recompute(segment)
            if each.enter is not None or each.leave is not None:
                unit, what = (each.leave, "left") if each.leave is not None else (each.enter, "entered")
                assert unit is not None
                self.border(unit, what)
                continue
            mine = buffers.pop(number, None)
            if mine is not None:
                self._gradients(each, mine, buffers, halves)
            self._release(number, each, halves)
            if (segment := self.tape.within[number]) is not None and number == segment.start:
                self._end(segment)

    def _gradients(self, each: Operator, mine: list[int], buffers: dict[int, list[int]], halves: bool) -> None:
        ledger, made = self.ledger, 0
        ends: list[tuple[int, list[int]]] = []
        for source in each.inputs:
            if each.through:
                mine[1] += 1
                ends.append((source, mine))
            else:
                size = self.tape.operators[source].size
                made += size
                ledger.hold("temporary", size)
                ends.append((source, [size, 1]))
        if each.weight and not halves:
            self.weights(each.weight)
        ledger.touch("temporary", each.backward)
        for source, buffer in ends:
            there = buffers.get(source)
            if there is None:
                buffers[source] = buffer
                continue
            if there[1] > 1:  # someone else reads it too: the sum is new memory
                ledger.hold("temporary", max(there[0], buffer[0]))
                self._unread(there)
                buffers[source] = [max(there[0], buffer[0]), 1]
            self._unread(buffer)
        if each.weight and halves:
            ledger.hold("temporary", each.size)
            self.later.append(("temporary", each.size))
        self._unread(mine)

    def _unread(self, buffer: list[int]) -> None:
        buffer[1] -= 1
        if buffer[1] == 0:
            self.ledger.free("temporary", buffer[0])

    def _release(self, number: int, each: Operator, halves: bool) -> None:
        if halves:
            self.later.append((each.part, each.extra))
        else:
            self.ledger.free(each.part, each.extra)
        for source in each.keep:
            if halves:
                continue
            self.keepers[source] -= 1
            self._drop(source)

    def _end(self, segment: Segment) -> None:
        """What the segment began with is not needed for it any more."""
        for source in self.tape.outside(segment):
            self.keepers[source] -= 1
            self._drop(source)

    def weight_half(self) -> None:
        """The gradients of weights, after which everything is free."""
        for each in reversed(self.tape.operators):
            if each.leave is not None:
                self.border(each.leave, "weights")
            elif each.enter is not None:
                self.border(each.enter, "weights done")
            elif each.weight:
                self.weights(each.weight)
        for part, size in self.later:
            self.ledger.free(part, size)
        for number, each in enumerate(self.tape.operators):
            if self.alive[number]:
                self.alive[number] = False
                self.ledger.free(each.part, each.size)
