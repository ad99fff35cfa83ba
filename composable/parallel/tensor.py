"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198) through torch's `parallelize_module`.

Weights become DTensors, which is what sharding, checkpoints and optimizers see; a block computes on their local parts,
where dispatch through DTensor would cost as much as a small product. Between blocks a rank holds its shard of the
sequence [B, S / tp, D]. What all ranks hold whole (norms, the biases of row-parallel layers, shared key/value heads)
gets a gradient of the rank's own tokens or heads on each, so that the sum over ranks is to be made once a step.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composable.linear import linear
from composable.models.attention import Attention
from composable.models.config import DecoderConfig
from composable.models.decoder import Decoder
from composable.parallel.collectives import (
    gather_sequence,
    gather_stacked,
    scatter_sequence,
    scatter_stacked,
    sum_over_ranks,
)
from composable.parallel.vocabulary import cross_entropy_sum_of_shards, look_up, rows_per_rank, whole_logits

Forward = Callable[..., Tensor]


def check_tensor(config: DecoderConfig, tp: int, seq_len: int) -> None:
    """Refuse what `tp` ranks cannot share.

    Args:
        seq_len: tokens of a row that a tensor group holds, after context parallelism.

    Raises:
        ValueError: naming the rule and the nearest right value.
    """
    ffn = config.ffn if len(config.expert_layers) < config.layers else tp  # experts are not cut by it
    if config.heads % tp:
        legal = [n for n in range(1, config.heads + 1) if config.heads % n == ffn % n == 0]
        raise ValueError(
            f"model.heads={config.heads} with mesh.tp={tp}: a query head is not cut, so tp must divide the heads; the "
            f"nearest mesh.tp is {min(legal, key=lambda n: abs(n - tp))}"
        )
    for name, size in (("model.ffn", ffn), ("data.seq_len", seq_len)):
        if size % tp:
            near = max(tp, round(size / tp) * tp)
            what = "the hidden width" if name == "model.ffn" else "between blocks the sequence"
            raise ValueError(
                f"{name}={size} with mesh.tp={tp}: {what} is cut in tp equal shards; the nearest multiple is {near}"
            )


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Spread a decoder, or a stage of one, over a tensor mesh, in place; before `fully_shard`.

    Without labels it gives whole logits on every rank. A stage takes and gives hidden states [B, S / tp, D].

    Args:
        model: on the meta device or not, the same on every rank.
        mesh: one dimension, named `tp`.

    Raises:
        ValueError: `check_tensor`'s.
    """
    ranks = mesh.size()
    if ranks == 1:
        return
    check_tensor(model.config, ranks, ranks)
    group, config = mesh.get_group(), model.config
    stacked = {"gather": partial(gather_stacked, group=group), "scatter": partial(scatter_stacked, group=group)}
    ordered = {"gather": partial(gather_sequence, group=group), "scatter": partial(scatter_sequence, group=group)}
    column = Local(_column, weight=Shard(0), bias=Shard(0))
    keys = column if config.kv_heads % ranks == 0 else Local(partial(_shared_heads, config, mesh))
    attention: dict[str, ParallelStyle] = {
        "self_attn": Local(partial(_attention, ordered["gather"]), sinks=Shard(0)),
        "self_attn.q_proj": column,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": keys,
        "self_attn.o_proj": Local(partial(_row, ordered["scatter"]), weight=Shard(1)),
    }
    if config.qk_norm_wide:
        norm = Local(partial(_wide_norm, group), weight=Shard(0))
        shared = config.kv_heads % ranks != 0
        attention["self_attn.q_norm"] = norm
        attention["self_attn.k_norm"] = Local(partial(_norm_of_shared_heads, config, mesh)) if shared else norm
    if config.latent is not None:  # latents are narrow: a rank makes those of its own tokens, and they are gathered
        attention = {
            "self_attn.sequence": Local(partial(_gather_parts, ordered["gather"])),
            f"self_attn.{'q_b_proj' if config.latent.q_rank else 'q_proj'}": column,
            "self_attn.kv_b_proj": column,
            "self_attn.o_proj": attention["self_attn.o_proj"],
        }
    dense: dict[str, ParallelStyle] = {
        "mlp": Local(partial(_before, stacked["gather"])),
        "mlp.gate_proj": column,
        "mlp.up_proj": column,
        "mlp.down_proj": Local(partial(_row, stacked["scatter"]), weight=Shard(1)),
    }
    plan: dict[str, ParallelStyle] = {}
    for layer in model.model.layers:  # experts take a rank's own tokens: parallel/expert.py
        block = attention if int(layer) in config.expert_layers else attention | dense
        plan |= {f"model.layers.{layer}.{name}": style for name, style in block.items()}
    if model.model.embed_tokens is not None:
        plan["model.embed_tokens"] = Local(partial(_embedding, config, mesh), weight=Shard(0))
    if model.model.norm is not None:
        plan["model.norm"] = Local(partial(_after, ordered["gather"]))
    if model.lm_head is not None:
        plan["lm_head"] = column
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, Local(partial(_decoder, mesh)))


class Local(ParallelStyle):
    """Parameters become shards, and the module's forward is replaced by one that computes on their local parts.

    Args:
        forward: given the module, as it was, makes its new forward.
        placements: by name of parameter; one that the module lacks is passed over.
    """

    def __init__(self, forward: Callable[[Any], Forward], **placements: Placement) -> None:
        super().__init__()
        self.forward = forward
        self.placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self.placements.items():
            whole = getattr(module, name, None)
            if whole is not None:
                # Every rank has the same whole tensor, or none yet (meta): each takes its part, nothing is sent.
                shard = distribute_tensor(whole.detach(), device_mesh, [placement], src_data_rank=None)
                setattr(module, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        module.forward = self.forward(module)
        return module


def _local(tensor: Tensor) -> Tensor:
    """The local part, with gradient; what is plain stays as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _column(module: nn.Linear) -> Forward:
    """Each rank computes its columns of the output."""
    return lambda x: linear(x, _local(module.weight), None if module.bias is None else _local(module.bias))


def _row(scatter: Forward, module: nn.Linear) -> Forward:
    """Each rank adds its part of the sum; the bias, which all hold, is added to the sum once: on its own shard."""

    def forward(x: Tensor) -> Tensor:
        out = scatter(linear(x, _local(module.weight)))
        return out if module.bias is None else out + module.bias

    return forward


def _shared_heads(config: DecoderConfig, mesh: DeviceMesh, module: nn.Linear) -> Forward:
    """Keys or values of the heads that this rank's query heads need, from a weight that every rank holds whole."""
    given = given_heads(config, mesh.size(), mesh.get_local_rank())
    first, count = given[0], given[-1] - given[0] + 1
    rows = slice(first * config.head_dim, (first + count) * config.head_dim)

    def forward(x: Tensor) -> Tensor:
        out = linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])
        if len(given) == count:
            return out
        heads = out.unflatten(-1, (count, config.head_dim)).unbind(-2)
        return torch.cat([heads[head - first] for head in given], dim=-1)

    return forward


def given_heads(config: DecoderConfig, ranks: int, rank: int) -> list[int]:
    """Key/value heads as a rank's attention is given them: each once where they serve equally many of its query heads
    in turn, else one for each query head."""
    queries, share = config.heads // ranks, config.heads // config.kv_heads
    needed = [head // share for head in range(rank * queries, (rank + 1) * queries)]  # of each query head
    once = sorted(set(needed))
    even = queries % len(once) == 0 and needed == [once[i // (queries // len(once))] for i in range(queries)]
    return once if even else needed


def _wide_norm(group: dist.ProcessGroup, module: nn.RMSNorm) -> Forward:
    """RMSNorm over the heads of all ranks."""
    width = module.weight.size(0)
    return lambda x: _norm_by(x, _squares(x), width, _local(module.weight), module.eps, group)


def _norm_of_shared_heads(config: DecoderConfig, mesh: DeviceMesh, module: nn.RMSNorm) -> Forward:
    """RMSNorm over key heads of which several ranks have the same, by a weight that every rank holds whole."""
    given = [given_heads(config, mesh.size(), rank) for rank in range(mesh.size())]
    copies = Counter(head for heads in given for head in heads)
    mine = given[mesh.get_local_rank()]
    heads = torch.tensor(mine, device=mesh.device_type)
    share = torch.tensor([1 / copies[head] for head in mine], dtype=torch.float64, device=mesh.device_type)
    group, cut = mesh.get_group(), (-1, config.head_dim)

    def forward(x: Tensor) -> Tensor:
        squares = _squares(x.unflatten(-1, cut))[..., 0]  # [B, S, heads]
        total = (squares * share.to(squares.dtype)).sum(-1, keepdim=True)  # each head counts once
        weight = module.weight.unflatten(0, cut).index_select(0, heads).flatten()
        return _norm_by(x, total, config.kv_heads * config.head_dim, weight, module.eps, group)

    return forward


def _squares(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1, keepdim=True)


def _norm_by(
    x: Tensor, squares: Tensor, width: int, weight: Tensor, eps: float | None, group: dist.ProcessGroup
) -> Tensor:
    """RMSNorm of `width` elements, of which x [..., w] are this rank's and `squares` [..., 1] is what they add."""
    assert eps is not None
    scale = (sum_over_ranks(squares, group) / width + eps).rsqrt()
    return (x * scale * weight).to(x.dtype)


def _before(gather: Forward, module: nn.Module) -> Forward:
    """The module sees the sequence of all ranks."""
    whole = module.forward
    return lambda x, *rest: whole(gather(x), *rest)


def _attention(gather: Forward, module: Attention) -> Forward:
    """As `_before`, with the sinks of this rank's heads."""
    if getattr(module, "sinks", None) is not None:
        module.sink_logits = lambda: _local(module.sinks)  # type: ignore[method-assign,arg-type]
    return _before(gather, module)


def _gather_parts(gather: Forward, module: nn.Module) -> Forward:
    """Tensors [B, s, any width] of this rank's tokens -> those of all tokens, by one collective."""
    return lambda *parts: gather(torch.cat(parts, dim=-1)).split([part.size(-1) for part in parts], dim=-1)


def _after(gather: Forward, module: nn.Module) -> Forward:
    """The module sees its rank's shard of the sequence, and what follows it all of it."""
    shard = module.forward
    return lambda x: gather(shard(x))


def _embedding(config: DecoderConfig, mesh: DeviceMesh, module: nn.Embedding) -> Forward:
    first = mesh.get_local_rank() * rows_per_rank(config.vocab_size, mesh.size())
    group = mesh.get_group()
    return lambda tokens: look_up(tokens, _local(module.weight), first, group)


def _decoder(mesh: DeviceMesh, model: Decoder) -> Forward:
    """Head and loss of vocabulary shards; whole logits, of sequences of any length, where there are no labels."""
    ranks, group, vocab = mesh.size(), mesh.get_group(), model.config.vocab_size
    whole, head_weight = model.forward, model.head_weight
    first = mesh.get_local_rank() * rows_per_rank(vocab, ranks)
    model.head_weight = lambda: _local(head_weight())  # type: ignore[method-assign]
    model.loss = partial(cross_entropy_sum_of_shards, first=first, group=group)

    def forward(
        x: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        indices: Tensor | None = None,
        **told: Tensor | None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(x.size(1) * (1 if model.first else ranks), device=x.device)
        length, short = x.size(1), -x.size(1) % ranks if model.first else 0
        if short and (labels is not None or model.model.norm is None):
            raise ValueError(f"a sequence of {length} tokens is not cut in mesh.tp={ranks} equal shards; add {short}")
        if indices is None and model.config.moe is not None and model.first:
            indices = torch.arange(x.size(0) * length, device=x.device).view(-1, length)
        if short:  # after the end, where causal attention does not look from before
            x, positions = F.pad(x, (0, short)), F.pad(positions, (0, short))
            documents = None if documents is None else F.pad(documents, (0, short), value=-1)
            indices = None if indices is None else F.pad(indices, (0, short), value=-1)
        mine = None if indices is None else indices.chunk(ranks, 1)[mesh.get_local_rank()]
        out = whole(x, labels, positions, documents, mine, **told)
        if model.model.norm is None or labels is not None:
            return out
        return whole_logits(out, vocab, group)[:, : length if model.first else None]

    return forward
