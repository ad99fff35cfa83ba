"""What data parallelism holds on its way through a step: gathered parameters, whole gradients, buffers of collectives.

The order of events is that of FSDP2 in torch 2.13, which holds a unit's gathered buffer until the next unit has its
own, gathers one unit ahead in the backward pass, and keeps the input of a reduction until the next one begins.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from composable.plan.shards import Unit
from composable.plan.tape import Ledger


@dataclass(frozen=True)
class Items:
    """Bytes of a number."""

    kept: int
    """of parameters that the optimizer updates"""
    computed: int
    """of parameters and gradients in computation"""
    reduced: int
    """of gradients in reductions"""


class Exchange:
    """The units of a stage through a step, over a ledger.

    Args:
        units: in the order of the forward pass, the root first.
        gradients: where sharded gradients lie: the part of the ledger, "" if not on this device.
        copies: parameters and gradients lie on the host: shards are copied to the device before they are gathered.
        at_end: gradients are reduced when the caller says so (pipelines), not after each unit's backward pass.
    """

    def __init__(
        self, units: list[Unit], ledger: Ledger, items: Items, *, gradients: str, copies: bool, at_end: bool
    ) -> None:
        self.units, self.ledger, self.items, self.at_end = units, ledger, items, at_end
        self.gradients, self.copies = gradients, copies
        count = len(units)
        self.full = [False] * count
        self.flat = [False] * count
        self.whole = [0] * count
        """bytes of unsharded gradients that are there"""
        self.seen = [0] * count
        """bytes of them that this micro-batch has given so far"""
        self.summed = [False] * count
        """sharded gradients are there"""
        self.deferred: int | None = None
        """unit whose gathered buffer waits for the next one's"""
        self.reducing = 0
        """bytes of the reduction's input that is still held"""
        self.order: list[int] = []
        self.inside: list[int] = [0]
        self.last = self.sync = self.reshards = True

    def micro_batch(self, *, last: bool, sync: bool, reshards: bool) -> None:
        """Before a micro-batch.

        Args:
            last: it is the last of the step.
            sync: gradients are reduced after its backward pass.
            reshards: parameters are given back after it.
        """
        self.last, self.sync, self.reshards = last, sync, reshards
        self.order, self.inside = [], [0]

    def state(self) -> tuple[object, ...]:
        """All that decides what comes next; of the order in which units were left, the last pass's."""
        lists: tuple[Sequence[object], ...] = (
            self.full,
            self.flat,
            self.whole,
            self.seen,
            self.summed,
            self.order[-len(self.units) - 1 :],
            self.inside,
        )
        return tuple(map(tuple, lists)), (self.deferred, self.reducing, self.last, self.sync, self.reshards)

    def restore(self, state: tuple[Any, ...]) -> None:
        """What `state` gave."""
        lists, (self.deferred, self.reducing, self.last, self.sync, self.reshards) = state
        self.full, self.flat, self.whole, self.seen, self.summed, self.order, self.inside = map(list, lists)

    @contextlib.contextmanager
    def over(self, ledger: Ledger) -> Iterator[None]:
        """For a while over another ledger."""
        usual, self.ledger = self.ledger, ledger
        yield
        self.ledger = usual

    def border(self, unit: int, what: str) -> None:
        """As `tape.Border`."""
        if what == "enter":
            self.inside.append(unit)
            self._gather(unit, forward=True)
        elif what == "leave":
            self.inside.pop()
            if self.units[unit].sharded:
                if not self.units[unit].keeps:
                    self._reshard(unit)
                self.order.append(unit)
        elif what == "enter again":
            self.inside.append(unit)
            self._gather(unit, forward=False)
        elif what == "weights":
            self.inside.append(unit)
        elif what in ("leave again", "weights done"):
            self.inside.pop()
        elif what == "left":
            self.inside.append(unit)
            self._gather(unit, forward=False)
            if unit in self.order:
                place = len(self.order) - 1 - self.order[::-1].index(unit)
                if place:
                    self._unshard(self.order[place - 1])
        else:
            self.inside.pop()
            if self.at_end:
                self._widen(unit)
            else:
                self.finish(unit)

    def begin_forward(self) -> None:
        """The root's parameters come first, and stay."""
        self._gather(0, forward=True)

    def end_forward(self) -> None:
        self._let_go()
        self.order.append(0)

    def begin_backward(self) -> None:
        """The unit that comes last in the forward pass is gathered ahead."""
        self.inside = [0]
        if self.units[0].sharded and len(self.order) > 1:
            self._unshard(self.order[-2])

    def end_backward(self) -> None:
        """The root's turn."""
        if self.at_end:
            self._widen(0)
            return
        self.finish(0)
        if self.last:
            self._wait()

    def reduce_all(self) -> None:
        """At the end of a pipeline's pass."""
        for unit in range(len(self.units)):
            self.finish(unit)
        self._wait()

    def _wait(self) -> None:
        self.ledger.free("communication", self.reducing)
        self.reducing = 0

    def weights(self, size: int) -> None:
        """Gradients of weights of the innermost unit are there."""
        unit = self.inside[-1]
        plain = not self.units[unit].sharded
        total = self.units[unit].elements * self.items.computed
        if self.whole[unit] + size > total:  # they are there from an earlier micro-batch: added, and freed
            self.ledger.touch("temporary", size)
            if not plain and self.items.reduced != self.items.computed:
                self.ledger.hold("gradients", size)
                self.seen[unit] += size
            return
        self.whole[unit] += size
        self.ledger.hold("gradients", size)

    def finish(self, unit: int) -> None:
        """After the backward pass of a unit: its parameters are given back, its gradients reduced."""
        each, items, ledger = self.units[unit], self.items, self.ledger
        if not each.sharded:
            return
        if not self.sync:
            if self.reshards:
                self._reshard(unit)
            self._widen(unit)
            return
        if self.reshards:
            self._reshard(unit)
        ledger.free("gradients", self.seen[unit])
        self.seen[unit] = 0
        ledger.free("communication", self.reducing)
        self.reducing = each.padded * items.reduced
        if not each.weights:
            return
        if each.ranks > 1 and each.across:
            ledger.touch("temporary", max(w.elements for w in each.weights) * items.computed)
        ledger.hold("communication", self.reducing)
        ledger.free("gradients", self.whole[unit])
        self.whole[unit] = 0
        output = each.shard * items.reduced
        ledger.hold("communication", output)
        if each.ranks == 1:
            ledger.touch("temporary", output)
        ledger.hold(self.gradients or "temporary", each.shard * items.kept)
        if self.summed[unit] or not self.gradients:
            ledger.free(self.gradients or "temporary", each.shard * items.kept)
        ledger.free("communication", output)
        self.summed[unit] = True

    def _widen(self, unit: int) -> None:
        """Whole gradients that wait for later micro-batches have the dtype of the reduction."""
        if self.items.reduced == self.items.computed:
            return
        self.ledger.free("gradients", self.seen[unit])
        self.seen[unit] = 0
        wanted = self.units[unit].elements * self.items.reduced
        if self.whole[unit] and self.whole[unit] != wanted:
            self.ledger.hold("gradients", wanted)
            self.ledger.free("gradients", self.whole[unit])
            self.whole[unit] = wanted

    def _unshard(self, unit: int) -> None:
        each = self.units[unit]
        if not each.sharded or self.full[unit] or self.flat[unit] or each.ranks == 1:
            return
        if self.items.computed != self.items.kept or self.copies:
            self.ledger.hold("temporary", each.shard * self.items.computed)
        self.ledger.hold("communication", each.padded * self.items.computed)
        if self.items.computed != self.items.kept or self.copies:
            self.ledger.free("temporary", each.shard * self.items.computed)
        self.flat[unit] = True

    def _gather(self, unit: int, *, forward: bool) -> None:
        each = self.units[unit]
        if not each.sharded or self.full[unit]:
            return
        self._unshard(unit)
        if forward:
            self._let_go()
        if each.ranks > 1:
            self.ledger.touch("temporary", each.across * self.items.computed)
        self.ledger.hold("gathered", each.padded * self.items.computed)
        self.full[unit] = True
        if not self.flat[unit]:
            return
        if forward:
            self.deferred = unit
        else:
            self.ledger.free("communication", each.padded * self.items.computed)
            self.flat[unit] = False

    def _let_go(self) -> None:
        if self.deferred is not None:
            self.ledger.free("communication", self.units[self.deferred].padded * self.items.computed)
            self.flat[self.deferred] = False
            self.deferred = None

    def _reshard(self, unit: int) -> None:
        if self.full[unit]:
            self.ledger.free("gathered", self.units[unit].padded * self.items.computed)
            self.full[unit] = False
