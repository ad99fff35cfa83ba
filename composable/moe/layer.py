"""A feed-forward layer of routed experts, on one process or on many."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable.linear import linear
from composable.moe.balance import at_backward, inject, losses, statistics, sum_counts, weighted
from composable.moe.capacity import limit
from composable.moe.config import MoEConfig
from composable.moe.dispatch import ExpertRanks
from composable.moe.experts import Experts
from composable.moe.noise import Draw
from composable.moe.router import Router, Routing, count, explore, jittered, route


@dataclass(frozen=True)
class Routed:
    """What one layer did with a micro-batch: tensors without gradient, on the device; padding is left out."""

    layer: int
    chosen: Tensor
    """[E] int64 choices of each expert before any drop, of this rank's tokens: what moves the bias"""
    executed: Tensor
    """[E] int64 choices of each expert that were executed, of this rank's tokens"""
    losses: dict[str, Tensor]
    """[] by name, before coefficients, of the whole micro-batch, times its share of the step's tokens: the same on
    every rank that holds a part of it"""


@dataclass(frozen=True)
class TokenInfo:
    """What layers with experts are told of a micro-batch, beside its hidden states; [B, S] are those of this rank."""

    index: Tensor | None = None
    """[B, S] int64: each token's index among all of the step (sample, then position)"""
    mask: Tensor | None = None
    """[B, S] bool, False: padding; None: there is none"""
    scale: Tensor | None = None
    """[] the micro-batch's share of the step's tokens that are not padding; None: no balance losses (evaluation)"""
    seed: int = 0
    step: int | Tensor | None = None
    """of the optimizer, for exploration; None: there is none (evaluation)"""
    counts: Mapping[int, Tensor] | None = None
    """layer -> [E] choices among all tokens of the step, for balance of global scope"""
    record: Callable[[Routed], None] | None = None
    """is given each layer's `Routed`: in the backward pass, hence once whatever is recomputed; without gradients at
    once. None: nobody asks (evaluation)"""


@dataclass(frozen=True)
class Runtime:
    """Where layers with experts run, and whom they tell: chosen when the model is built."""

    ranks: ExpertRanks | None = None
    """ranks that share the experts; None: all are here"""
    batch_group: dist.ProcessGroup | None = None
    """ranks that hold other tokens of the same sequences, as many each: those of context and tensor parallelism"""
    step_group: dist.ProcessGroup | None = None
    """ranks that hold all tokens of a step, if each has one micro-batch of it: for balance of global scope"""
    side: torch.cuda.Stream | None = None
    """on which shared experts are computed while tokens travel; None: one after the other"""
    seed: int = 0
    """of exploration"""
    record: Callable[[Routed], None] | None = None
    """as in `TokenInfo`, of training"""

    @property
    def groups(self) -> dict[str, Any]:
        """What `MoE.forward` takes of it."""
        groups = {"ranks": self.ranks, "batch_group": self.batch_group, "step_group": self.step_group}
        return groups | {"side": self.side}


ALONE = Runtime()
"""one process"""


class Gate(nn.Module):
    """The router's weights [E, D]; it computes in float32 or wider whatever their dtype."""

    e_score_correction_bias: Tensor | None

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, dim).uniform_(-(dim**-0.5), dim**-0.5))
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.router_bias else None
        # A buffer: data parallelism neither shards it nor rounds it. On the CPU even where parameters have no memory
        # yet, so that it has its value.
        start = torch.zeros(config.experts, dtype=torch.float32, device="cpu") if config.correction else None
        self.register_buffer("e_score_correction_bias", start)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> logits [T, E]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class MoE(nn.Module):
    """A weighted sum of the experts that the router chooses for each token, and of the shared one.

    Args:
        dim: width of the residual stream.
        config: experts, router, balance.
        layer: global index, which randomness and records go by.
        shared: [..., D] -> [..., D], the network that every token passes, of hidden width `config.shared_ffn`; None if
            that is 0.

    Raises:
        ValueError: a shared network without width, or the other way round.
    """

    def __init__(self, dim: int, config: MoEConfig, layer: int = 0, shared: nn.Module | None = None) -> None:
        super().__init__()
        if (shared is None) != (config.shared_ffn == 0):
            raise ValueError(
                f"moe.shared_ffn={config.shared_ffn} with{'out' if shared is None else ''} a shared network: give one "
                "exactly if the width is not 0"
            )
        self.config = config
        self.layer = layer
        self.route: Router = route
        self.limit: Callable[..., Routing] = limit
        self.gate = Gate(dim, config)
        self.experts = Experts(
            config.experts,
            dim,
            config.ffn,
            config.dispatcher,
            config.capacity.factor,
            fused=config.fused,
            bias=config.expert_bias,
            limit=config.swiglu_limit,
        )
        self.shared_experts = shared
        self.shared_expert_gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def forward(
        self,
        x: Tensor,
        info: TokenInfo | None = None,
        *,
        ranks: ExpertRanks | None = None,
        batch_group: dist.ProcessGroup | None = None,
        step_group: dist.ProcessGroup | None = None,
        side: torch.cuda.Stream | None = None,
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]; collective over all groups.

        Args:
            info: of the micro-batch; None outside of training.
            ranks: that share the experts; None: all are here.
            batch_group: ranks that hold other tokens of the same B sequences, as many each: those of context and
                tensor parallelism; None: this one alone.
            step_group: ranks over which choices are counted for balance of global scope, where `info` has no counts.
            side: a stream for the shared experts; None: the current one.

        Raises:
            ValueError: exploration, or capacity over several ranks, without the tokens' index.
        """
        info = info or TokenInfo()
        flat = x.flatten(0, 1)
        bias = self.gate.e_score_correction_bias
        draw = self._draw(info)
        logits = explore(self.gate(jittered(flat, self.config, draw)), self.config, draw)  # [T, E]
        chosen = self.route(logits, self.config, bias)
        index, mask = (None if value is None else value.flatten() for value in (info.index, info.mask))
        routing = self.limit(chosen, logits, self.config, index=index, mask=mask, bias=bias, group=batch_group)
        shared = self._shared(x, side)
        batch_ranks = 1 if batch_group is None else dist.get_world_size(batch_group)
        out = self.experts(flat, routing, ranks, batch_ranks).view_as(x)
        out = out if shared is None else out + shared()
        return self._account(out, logits, chosen, routing, info, batch_group, step_group)

    def _shared(self, x: Tensor, side: torch.cuda.Stream | None) -> Callable[[], Tensor] | None:
        """Starts the shared experts, beside what follows if there is a stream for them; gives what waits for them."""
        if self.shared_experts is None:
            return None
        if side is None or torch.compiler.is_compiling():  # compiled graphs have one stream
            out = self._all_tokens(x)
            return lambda: out
        current = torch.cuda.current_stream(x.device)
        side.wait_stream(current)
        x.record_stream(side)
        with torch.cuda.stream(side):
            out = self._all_tokens(x)

        def wait() -> Tensor:
            current.wait_stream(side)
            out.record_stream(current)
            return out

        return wait

    def _all_tokens(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        out = self.shared_experts(x)
        return out if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * out

    def _draw(self, info: TokenInfo) -> Draw | None:
        if info.step is None or not self.config.exploration.draws:
            return None
        if info.index is None:
            raise ValueError("moe.exploration draws by the tokens' index in the step: give `index`")
        return Draw(info.seed, info.step, self.layer, info.index.flatten())

    def _account(
        self,
        out: Tensor,
        logits: Tensor,
        chosen: Routing,
        routing: Routing,
        info: TokenInfo,
        batch_group: dist.ProcessGroup | None,
        step_group: dist.ProcessGroup | None,
    ) -> Tensor:
        """out [B, S, D] with the gradients of balance and the record of what was done."""
        values: dict[str, Tensor] = {}
        if info.scale is not None and self.config.balance.losses:
            logits, ids = logits.view(*out.shape[:2], -1), routing.ids.view(*out.shape[:2], -1)
            total = statistics(logits, ids, self.config, mask=info.mask, group=batch_group)
            values = losses(total, self.config, self._load(routing.ids, info, step_group))
            out = inject(out, weighted(values, self.config), info.scale)
        return self._report(out, chosen.ids, routing.ids, values, info)

    def _load(self, executed: Tensor, info: TokenInfo, step_group: dist.ProcessGroup | None) -> Tensor | None:
        """[E] choices among all tokens of the step; None: those of the micro-batch count."""
        if info.counts is not None:
            return info.counts[self.layer]
        if not self.config.balance.counts_step or step_group is None:
            return None
        counts = count(executed, self.config.experts, None if info.mask is None else info.mask.flatten())
        return sum_counts(counts, step_group)

    @torch.compiler.disable
    def _report(
        self, out: Tensor, chosen: Tensor, executed: Tensor, values: dict[str, Tensor], info: TokenInfo
    ) -> Tensor:
        """Outside of compiled graphs, which would be made anew for every other `record`."""
        if info.record is None:
            return out
        mask, experts, give = None if info.mask is None else info.mask.flatten(), self.config.experts, info.record
        routed = Routed(
            self.layer,
            count(chosen, experts, mask),
            count(executed, experts, mask),
            {name: value.detach() * info.scale for name, value in values.items() if info.scale is not None},
        )
        return at_backward(out, lambda: give(routed))
