"""Passes of a pipeline's stage over a ledger, each played through once for every state that it can find.

A stage does the same for micro-batch after micro-batch: what a pass holds and frees depends on the stage's operators
and on what its units have gathered and reduced so far, so that the second of a kind is added up without its operators.
"""

import functools
from collections.abc import Hashable

from composable.plan.bubble import Kind
from composable.plan.exchange import Exchange
from composable.plan.tape import Ledger, Pass, Tape


class StagePasses:
    """The passes of one stage; `ledger` is the one of the rank."""

    def __init__(self, tape: Tape, exchange: Exchange, ledger: Ledger) -> None:
        self.tape, self.exchange, self.ledger = tape, exchange, ledger
        self._known: dict[tuple[Kind, Hashable], tuple[Ledger, tuple[object, ...]]] = {}

    def play(self, kind: Kind) -> None:
        """One pass of a micro-batch."""
        key = kind, self.exchange.state()
        if key not in self._known:
            alone = Ledger()
            with self.exchange.over(alone):
                self._play(kind, alone)
            self._known[key] = alone, self.exchange.state()
        held, after = self._known[key]
        self.ledger.add(held)
        self.exchange.restore(after)

    def _play(self, kind: Kind, ledger: Ledger) -> None:
        exchange = self.exchange
        before = self._new if kind == "F" else self._halved if kind == "W" else self._forwarded
        run = before.over(ledger, exchange.border, exchange.weights)
        if kind == "F":
            exchange.begin_forward()
            run.forward()
            exchange.end_forward()
        elif kind == "W":
            run.weight_half()
        else:
            exchange.begin_backward()
            run.backward(halves=kind == "I")
            exchange.end_backward()

    # A pass as it is before each of its parts: that does not depend on what its units have gathered.

    @functools.cached_property
    def _new(self) -> Pass:
        return Pass(self.tape, Ledger(), _ignore, _ignore)

    @functools.cached_property
    def _forwarded(self) -> Pass:
        run = self._new.over(Ledger(), _ignore, _ignore)
        run.forward()
        return run

    @functools.cached_property
    def _halved(self) -> Pass:
        run = self._forwarded.over(Ledger(), _ignore, _ignore)
        run.backward(halves=True)
        return run


def _ignore(*what: object) -> None:
    """Nothing is gathered or reduced."""
