"""The experts of a layer: SwiGLU networks (Shazeer 2020, arXiv:2002.05202) with stacked weights, multiplied in groups.

On an accelerator by grouped matrix products. On a CPU by a loop over the experts within one autograd function: torch's
grouped product in float32 goes to MKL there and reached half the speed of oneDNN's on an AMD EPYC core (63 against 33
ms forward and backward, 4,096 rows, 8 experts of 256 x 344); in bfloat16 it was level, and float64 it does not have.
Between its products an expert's activations stay in the core's cache.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.moe.config import Dispatcher
from composable.moe.dispatch import ExpertRanks, all_to_all, alone, combine, dispatch, expert_order
from composable.moe.glu import PLAIN, Form, glu
from composable.moe.hierarchical import hierarchical
from composable.moe.loop import expert_by_expert
from composable.moe.router import Routing
from composable.moe.static import combine_blocks, dispatch_blocks, room_for


class Experts(nn.Module):
    """down(silu(gate(x)) * up(x)) for each expert; gate_proj and up_proj [E, F, D], down_proj [E, D, F].

    Fused, gate and up are one stack gate_up_proj [E, 2 F, D], whose even rows are gate's. With biases gate_bias and
    up_bias [E, F] (fused: gate_up_bias [E, 2 F]) and down_bias [E, D].

    The experts of this rank alone, once a parameter is a part of the stack, or a DTensor of which it has a part; and a
    part of the hidden width F, where that is shared out: the outputs are then to be added up over its ranks. Such a
    rank has, and adds, those columns of down_bias that begin at `first_column`.

    Args:
        experts: of all ranks together.
        dispatcher: how tokens come to the ranks of their experts.
        factor: capacity factor that the routing keeps; only `static` needs it.
        limit: of the clamped SwiGLU (`glu`); 0: the plain one.
    """

    down_bias: nn.Parameter

    def __init__(
        self,
        experts: int,
        dim: int,
        ffn: int,
        dispatcher: Dispatcher = "all_to_all",
        factor: float = 0.0,
        *,
        fused: bool = False,
        bias: bool = False,
        limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.factor = factor
        self.fused = fused
        self.bias = bias
        self.limit = limit
        self.first_column = 0
        inner = {"gate_up": 2 * ffn} if fused else {"gate": ffn, "up": ffn}
        for name, width in inner.items():
            setattr(self, f"{name}_proj", nn.Parameter(torch.empty(experts, width, dim)))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, ffn))
        for name, width in (inner | {"down": dim}).items() if bias else ():
            setattr(self, f"{name}_bias", nn.Parameter(torch.empty(experts, width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(inputs), as `nn.Linear`; biases zero."""
        for weight in self.parameters():
            bound = weight.size(-1) ** -0.5 if weight.ndim == 3 else 0.0
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, routing: Routing, ranks: ExpertRanks | None = None, batch_ranks: int = 1) -> Tensor:
        """x [T, D] -> [T, D]: the experts' outputs, added up with their weights; collective over `ranks`.

        An expert without rows gets a gradient of zeros.

        Args:
            routing: of those tokens.
            ranks: that share the experts; None: all are here.
            batch_ranks: ranks that hold a part of the same micro-batch, as many tokens each; only `static` asks.

        Raises:
            ValueError: this rank has another number of experts than its part; or ranks without the groups that the
                dispatcher needs.
        """
        gate, up, down = (*self._gate_and_up("proj"), _local(self.down_proj))
        form = self._form(x.size(-1))
        experts = routing.counts.numel()
        part = experts // (1 if ranks is None else dist.get_world_size(ranks.group))
        if part != len(gate):
            raise ValueError(
                f"{part} experts are this rank's part of the layer's, and it holds {len(gate)}: give the ranks that "
                "share the experts"
            )
        if self.dispatcher == "static":
            room = room_for(self.factor, len(x), batch_ranks, routing.ids.size(1), experts)
            pack = room > 0 and _packs(x, gate, down)
            return swiglu_in_blocks(x, routing, gate, up, down, room, ranks, pack=pack, form=form)
        if x.device.type == "cpu" and alone(ranks):
            return swiglu_in_place(x, routing, gate, up, down, form)
        plan = hierarchical if self.dispatcher == "hierarchical" else all_to_all
        rows, counts, record = dispatch(x, routing, ranks, plan)
        return combine(swiglu(rows, gate, up, down, counts, form), record, routing.weights)

    def _gate_and_up(self, kind: str) -> tuple[Tensor, Tensor]:
        """What there is of gate and up on this rank, [E, F, ...] each."""
        if not self.fused:
            return _local(getattr(self, f"gate_{kind}")), _local(getattr(self, f"up_{kind}"))
        gate, up = _local(getattr(self, f"gate_up_{kind}")).unflatten(1, (-1, 2)).unbind(2)
        return gate, up

    def _form(self, dim: int) -> Form:
        if not self.bias:
            return Form(limit=self.limit) if self.limit else PLAIN
        down = _local(self.down_bias)
        down = F.pad(down, (self.first_column, dim - self.first_column - down.size(1)))
        return Form(*self._gate_and_up("bias"), down, self.limit)


@torch.compiler.disable
def swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int], form: Form = PLAIN) -> Tensor:
    """rows [R, D] through experts gate, up [E, F, D], down [E, D, F], counts[e] rows each -> [R, D]."""
    if len(rows) == 0 or not _groups(rows, gate, down):
        return expert_by_expert(rows, gate, up, down, counts, form)
    ends = torch.tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    return grouped_swiglu(rows, gate, up, down, ends, form)


def grouped_swiglu(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor, form: Form = PLAIN) -> Tensor:
    """rows [R, D], those of each expert up to ends [E] int32 -> [R, D], anything after the last end."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.grouped_mm(x, weight.mT, offs=ends)
        return out if bias is None else out + _of_rows(bias, len(x), ends)

    hidden = glu(product(rows, gate, form.gate_bias), product(rows, up, form.up_bias), form.limit)
    return product(hidden, down, form.down_bias)


def _of_rows(bias: Tensor, rows: int, ends: Tensor) -> Tensor:
    """bias [E, O] -> that of each row's expert [rows, O].

    A grouped product with ones, and zeros up to 16 bytes: so is its gradient, whose order of sums is fixed, which that
    of an index is not on an accelerator.
    """
    width = 16 // bias.element_size()
    ones = F.pad(bias.new_ones(rows, 1), (0, width - 1))
    return F.grouped_mm(ones, F.pad(bias[:, None], (0, 0, 0, width - 1)), offs=ends)


def swiglu_in_blocks(
    x: Tensor,
    routing: Routing,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    room: int,
    ranks: ExpertRanks | None,
    *,
    pack: bool,
    form: Form = PLAIN,
) -> Tensor:
    """x [T, D] through experts that get blocks of `room` rows from every rank -> [T, D]; no shape depends on routing.

    Args:
        pack: multiply the rows that came alone, by grouped products; or the padding too, by batched ones.
    """
    rows, blocks = dispatch_blocks(x, routing, room, ranks, pack=pack)
    if blocks.packed is not None:
        out = grouped_swiglu(rows, gate, up, down, blocks.packed.ends, form)
    else:
        hidden = glu(_batched(rows, gate, form.gate_bias), _batched(rows, up, form.up_bias), form.limit)
        out = _batched(hidden, down, form.down_bias)
    return combine_blocks(out, blocks, routing.weights)


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [E, N, I], weight [E, O, I], bias [E, O] -> [E, N, O]."""
    out = x @ weight.mT
    return out if bias is None else out + bias[:, None]


@torch.compiler.disable
def swiglu_in_place(x: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor, form: Form = PLAIN) -> Tensor:
    """x [T, D] through the experts of each token, added up with weights in float32 or wider -> [T, D]; on a CPU.

    What `dispatch`, `swiglu` and `combine` give without a group, up to rounding, while the rows of one expert alone
    exist at a time: on a CPU, new memory costs as much as the arithmetic on it.
    """
    counts = routing.counts.tolist()
    choices = expert_order(routing)[: sum(counts)]
    weights = routing.weights.flatten().index_select(0, choices)
    return expert_by_expert(x, gate, up, down, counts, form, choices // routing.ids.size(1), weights)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _groups(x: Tensor, gate: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped product is to be used: an accelerator, not float64, rows of multiples of 16 bytes."""
    aligned = all(w.size(-1) * w.element_size() % 16 == 0 for w in (gate, down))
    return x.device.type != "cpu" and x.dtype != torch.float64 and aligned


def _packs(x: Tensor, gate: Tensor, down: Tensor) -> bool:
    """Whether torch's grouped product leaves its offsets on the device: elsewhere it is a loop that reads them."""
    if not _groups(x, gate, down) or x.dtype != torch.bfloat16 or x.device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(x.device).major in (9, 10)
