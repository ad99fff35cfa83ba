"""What a rank multiplies in one micro-batch: the matrix products of every block, their shapes on that rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from composable.models.config import LatentConfig
from composable.parallel.split import Stage
from composable.plan.layers import Sizes
from composable.plan.shards import rows


@dataclass(frozen=True)
class Product:
    """`count` products [rows, inner] x [inner, columns]."""

    rows: float
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Of all of them; a backward pass has twice as many, half for each operand."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def bytes(self, item: int) -> float:
        """That all of them read and write at least, with numbers of `item` bytes."""
        each = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return each * self.count * item


@dataclass(frozen=True)
class Work:
    """The forward pass of one micro-batch through something."""

    products: tuple[Product, ...] = ()
    attention: float = field(default=0.0)
    """FLOPs of scores and weighted values, of those below the diagonal alone"""

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention)

    @property
    def flops(self) -> float:
        """Of all."""
        return sum(each.flops for each in self.products) + self.attention


def stage_work(sizes: Sizes, stage: Stage) -> Work:
    """Of a stage of a pipeline, or of a whole model."""
    found = Work()
    for layer in stage.layers:
        found += block_work(sizes, layer)
    return found + head_work(sizes) if stage.last else found


def head_work(sizes: Sizes) -> Work:
    """Of the head."""
    config = sizes.config
    return Work((Product(sizes.seen, config.dim, rows(config.vocab_size, sizes.mesh.tp)),))


def block_work(sizes: Sizes, layer: int) -> Work:
    """Of one block."""
    moe = sizes.config.moe
    routed = moe is not None and layer in sizes.config.expert_layers
    inside = _experts(sizes, layer) if routed else _swiglu(sizes, sizes.seen, sizes.config.ffn // sizes.mesh.tp)
    return Work((*_projections(sizes), *inside), _attention(sizes, layer))


def _projections(sizes: Sizes) -> tuple[Product, ...]:
    config, tp, seen = sizes.config, sizes.mesh.tp, sizes.seen
    heads = config.heads // tp
    if config.latent is not None:
        return _latent(sizes, config.latent, heads)
    queries, keys = heads * config.head_dim, max(config.kv_heads // tp, 1) * config.head_dim
    return (
        Product(seen, config.dim, queries),
        Product(seen, config.dim, keys, 2),
        Product(seen, queries, config.dim),
    )


def _latent(sizes: Sizes, latent: LatentConfig, heads: int) -> tuple[Product, ...]:
    """Down-projections are of the rank's own tokens, and the rest of all that attention sees."""
    dim, seen, tokens = sizes.config.dim, sizes.seen, sizes.tokens
    down = Product(tokens, dim, latent.kv_rank + latent.rope_dim)
    up = Product(seen, latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
    out = Product(seen, heads * latent.value_dim, dim)
    queries = Product(seen, latent.q_rank or dim, heads * latent.head_dim)
    first = (Product(tokens, dim, latent.q_rank),) if latent.q_rank else ()
    return (*first, queries, down, up, out)


def _attention(sizes: Sizes, layer: int) -> float:
    """FLOPs that a causal kernel does; context ranks have equal shares, as the sequence is cut head and tail."""
    config, length = sizes.config, sizes.seq_len
    window = min(config.window_of(layer) or length, length)
    pairs = window * length - window * (window - 1) / 2
    heads = config.heads // sizes.mesh.tp
    return 2.0 * sizes.batch * heads * (config.head_dim + config.value_dim) * pairs / sizes.mesh.cp


def _swiglu(sizes: Sizes, tokens: float, ffn: int, count: int = 1) -> tuple[Product, ...]:
    dim = sizes.config.dim
    return Product(tokens, dim, ffn, 2 * count), Product(tokens, ffn, dim, count)


def _experts(sizes: Sizes, layer: int) -> tuple[Product, ...]:
    """Router, shared experts, and this rank's part of the experts with their share of the rows."""
    moe, mesh = sizes.config.moe, sizes.mesh
    assert moe is not None
    found = [Product(sizes.tokens, sizes.config.dim, moe.experts)]
    if moe.shared_ffn:
        found += _swiglu(sizes, sizes.tokens, moe.shared_ffn)
    here = moe.experts // mesh.ep
    arriving = sizes.tokens * mesh.etp * moe.top_k * sizes.load_of(layer)
    return (*found, *_swiglu(sizes, arriving / here, moe.ffn // mesh.etp, here))
