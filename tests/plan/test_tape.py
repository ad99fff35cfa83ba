"""A tape holds and frees bytes as autograd does: counted by hand, and against torch itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable.observe.live import LiveMemory
from composable.plan.tape import SELF, Ledger, Pass, Segment, Tape

N, D = 64, 32
X, W = N * D * 4, D * D * 4  # bytes of activations and of a weight


def played(tape: Tape, *, halves: bool = False) -> tuple[int, int, Ledger]:
    """Bytes held after the forward pass, and at most; the ledger at the end."""
    ledger = Ledger()
    run = Pass(tape, ledger, lambda unit, what: None, lambda size: ledger.hold("gradients", size))
    run.forward()
    kept = ledger.total
    run.backward(halves=halves)
    if halves:
        run.weight_half()
    return kept, ledger.peak, ledger


def three_layers() -> Tape:
    """x -> linear -> tanh -> linear, tanh, linear, tanh."""
    tape = Tape()
    x = tape.add("x", 0)
    for _ in range(3):
        y = tape.add("y", X, x, keep=(x,), weight=W, product=True)
        x = tape.add("tanh", X, y, keep=(SELF,))
    return tape


def measured(*, again: bool) -> tuple[int, int]:
    """What torch holds of `three_layers` beside its input and weights."""
    layers = [nn.Parameter(torch.randn(D, D)) for _ in range(3)]
    x = torch.randn(N, D, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        for weight in layers:
            x = F.linear(x, weight).tanh()
        return x

    given = torch.ones(N, D)
    with LiveMemory() as live:
        live.claim((x, given, *layers), "parameters")
        before = live.now
        live.restart()
        out = checkpoint(body, x, use_reentrant=False, preserve_rng_state=False) if again else body(x)
        kept = live.now - before
        out.backward(given)
        del out
        return kept, live.peak - before


def test_what_stays_after_the_forward_pass_is_what_torch_keeps():
    kept, peak, _ = played(three_layers())
    assert kept == 3 * X == measured(again=False)[0]
    assert abs(peak - measured(again=False)[1]) <= X  # torch gives x a gradient that stays, here it is let go


def test_a_segment_keeps_its_input_alone_and_is_computed_again():
    tape = three_layers()
    tape.segments.append(Segment(1, len(tape.operators), False))
    kept, _, ledger = played(tape)
    assert kept == 0
    assert measured(again=True)[0] == X  # the result, which the caller has
    assert ledger.total == 3 * W
    tape = three_layers()
    tape.segments.append(Segment(1, len(tape.operators), True))
    assert played(tape)[0] == 3 * X  # products


def test_after_the_backward_pass_nothing_is_held_but_gradients_of_weights():
    for halves in (False, True):
        _, _, ledger = played(three_layers(), halves=halves)
        assert {part: size for part, size in ledger.now.items() if size} == {"gradients": 3 * W}


def test_between_the_halves_of_a_backward_pass_everything_is_kept():
    tape, ledger = three_layers(), Ledger()
    run = Pass(tape, ledger, lambda unit, what: None, lambda size: ledger.hold("gradients", size))
    run.forward()
    kept = ledger.total
    run.backward(halves=True)
    assert ledger.total == kept + 3 * X  # and what the three weights will be multiplied with


def test_a_residual_shares_its_gradient():
    tape = Tape()
    x = tape.add("x", X)
    y = tape.add("y", X, x, keep=(x,))
    tape.add("sum", X, x, y, through=True)
    _, peak, ledger = played(tape)
    assert peak == 3 * X  # x, y, sum; then the gradients of y and of x in the room of y and the sum
    assert ledger.total == 0


def test_what_is_held_at_the_peak_is_told_by_part():
    ledger = Ledger()
    ledger.hold("a", 3)
    ledger.touch("b", 4)
    ledger.hold("a", 2)
    assert (ledger.peak, ledger.at_peak, ledger.total) == (7, {"a": 3, "b": 4}, 5)
