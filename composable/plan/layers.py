"""What the parts of a decoder compute, written down as operators with their bytes (`tape.Tape`).

Kernels differ: on a CPU RMSNorm is a few operators and experts are a loop, on accelerators both are fused. Numbers of
bytes that an operator needs while it runs are those of this library's own code; scratch memory within torch's kernels
is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from composable.mesh import Mesh
from composable.models.config import DecoderConfig, LatentConfig
from composable.parallel.config import ContextKind
from composable.plan.shards import rows
from composable.plan.tape import SELF, Tape


@dataclass(frozen=True)
class Sizes:
    """Of one micro-batch on one rank, in tokens and bytes."""

    config: DecoderConfig
    mesh: Mesh
    batch: int
    """rows"""
    seq_len: int
    """tokens of a row"""
    item: int
    """bytes of a number that is computed with"""
    masked: bool
    """documents are kept apart by a mask"""
    accelerator: bool
    context: ContextKind
    load: float | Mapping[int, float]
    """rows of the rank's experts, over an even share; or of each layer that has experts"""

    def load_of(self, layer: int) -> float:
        """The load of one layer."""
        return self.load if isinstance(self.load, float | int) else self.load[layer]

    @property
    def wide(self) -> int:
        """Bytes of a number in float32 or wider."""
        return max(self.item, 4)

    @property
    def length(self) -> int:
        """Tokens of a row that attention and head see, after context parallelism."""
        return self.seq_len // self.mesh.cp

    @property
    def seen(self) -> int:
        """Tokens that attention and head see."""
        return self.batch * self.length

    @property
    def tokens(self) -> int:
        """Tokens between blocks, cut by sequence parallelism."""
        return self.seen // self.mesh.tp

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between blocks."""
        return self.tokens * self.config.dim * self.item


def embedding(tape: Tape, sizes: Sizes) -> int:
    """Tokens -> hidden states."""
    config, tp = sizes.config, sizes.mesh.tp
    weight = rows(config.vocab_size, tp) * config.dim * sizes.item
    whole = sizes.hidden * tp
    scratch = 2 * whole if tp > 1 else 0
    return tape.add("norms", sizes.hidden, weight=weight, forward=scratch, backward=scratch)


def tables(tape: Tape, sizes: Sizes) -> None:
    """Cosines and sines, and masks of documents, which all blocks read."""
    places = sizes.seen if sizes.masked else sizes.length
    mask = sizes.batch * sizes.seq_len * sizes.length if sizes.masked else 0
    wide = 8 if sizes.item == 8 else 4
    width = sizes.config.latent.rope_dim if sizes.config.latent else sizes.config.head_dim
    tape.add("attention", 0, extra=places * width * wide + mask)


def norm(tape: Tape, sizes: Sizes, x: int, elements: int, width: int, part: str = "norms") -> int:
    """RMSNorm of rows of `width` elements -> the same."""
    item, wide = sizes.item, sizes.wide
    weight = width * item
    if sizes.accelerator:
        extra = elements // width * 4
        return tape.add(part, elements * item, x, keep=(x,), extra=extra, backward=elements * item, weight=weight)
    small = elements // width * wide
    if item < 4:  # it is computed in float32, of which x and x / rms are kept
        extra, forward = 2 * elements * wide + small, elements * wide
        return tape.add(
            part, elements * item, x, extra=extra, forward=forward, backward=3 * elements * wide, weight=weight
        )
    extra = elements * item + small
    return tape.add(part, elements * item, x, keep=(x,), extra=extra, backward=2 * elements * item, weight=weight)


def linear(tape: Tape, sizes: Sizes, part: str, x: int, tokens: int, wide: int, narrow: int, bias: bool = False) -> int:
    """x [tokens, narrow] -> [tokens, wide]."""
    item = sizes.item
    return tape.add(part, tokens * wide * item, x, keep=(x,), weight=(wide * narrow + wide * bias) * item, product=True)


def gather(tape: Tape, sizes: Sizes, part: str, x: int, width: int, *, ordered: bool) -> int:
    """A rank's tokens -> those of its tensor group."""
    if sizes.mesh.tp == 1:
        return x
    size = sizes.seen * width * sizes.item
    copy = size if ordered and sizes.batch > 1 else 0
    return tape.add(part, size, x, forward=copy, backward=size + copy)


def scatter(tape: Tape, sizes: Sizes, part: str, x: int, *, ordered: bool) -> int:
    """Sums over a tensor group -> those of a rank's tokens."""
    if sizes.mesh.tp == 1:
        return x
    whole = sizes.hidden * sizes.mesh.tp
    copy = whole - sizes.hidden if ordered and sizes.batch > 1 else 0
    return tape.add(part, sizes.hidden, x, forward=whole + copy)


def rotated(tape: Tape, sizes: Sizes, x: int, elements: int) -> int:
    """Rotary embedding."""
    wide = sizes.wide
    cast = 0 if sizes.item == wide else elements * wide
    return tape.add(
        "attention",
        elements * sizes.item,
        x,
        forward=elements * wide + cast,
        backward=2 * elements * wide + cast,
    )


def attention(tape: Tape, sizes: Sizes, x: int, layer: int) -> int:
    """The normed hidden states -> what attention adds to them."""
    if sizes.config.latent is not None:
        return _latent(tape, sizes, sizes.config.latent, x)
    config, tp, seen = sizes.config, sizes.mesh.tp, sizes.seen
    heads = config.heads // tp
    keys = config.kv_heads // tp if config.kv_heads % tp == 0 else max(1, config.kv_heads // tp)
    x = gather(tape, sizes, "attention", x, config.dim, ordered=True)
    q, k, v = (
        linear(tape, sizes, "attention", x, seen, n * config.head_dim, config.dim, config.qkv_bias)
        for n in (heads, keys, keys)
    )
    q_size, k_size = seen * heads * config.head_dim, seen * keys * config.head_dim
    if config.qk_norm:
        widths = (heads * config.head_dim, keys * config.head_dim) if config.qk_norm_wide else (config.head_dim,) * 2
        q = norm(tape, sizes, q, q_size, widths[0], "attention")
        k = norm(tape, sizes, k, k_size, widths[1], "attention")
    q, k = rotated(tape, sizes, q, q_size), rotated(tape, sizes, k, k_size)
    window = config.window_of(layer)
    out = inner(tape, sizes, (q, k, v), heads, keys, config.head_dim, config.head_dim, window)
    out = linear(tape, sizes, "attention", out, seen, config.dim, heads * config.head_dim, config.output_bias)
    return scatter(tape, sizes, "attention", out, ordered=True)


def _latent(tape: Tape, sizes: Sizes, latent: LatentConfig, x: int) -> int:
    config, tp, item = sizes.config, sizes.mesh.tp, sizes.item
    heads, seen, tokens = config.heads // tp, sizes.seen, sizes.tokens
    for_q, width = x, config.dim
    if latent.q_rank:
        for_q = linear(tape, sizes, "attention", x, tokens, latent.q_rank, config.dim, config.qkv_bias)
        for_q = norm(tape, sizes, for_q, tokens * latent.q_rank, latent.q_rank, "attention")
        width = latent.q_rank
    down = latent.kv_rank + latent.rope_dim
    both = linear(tape, sizes, "attention", x, tokens, down, config.dim, config.qkv_bias)
    for_kv = norm(tape, sizes, both, tokens * latent.kv_rank, latent.kv_rank, "attention")
    if tp > 1:
        size = seen * (width + down) * item
        joined = tape.add("attention", size, for_q, for_kv, forward=2 * size, backward=2 * size)
        for_q = for_kv = both = joined
    queries = heads * latent.head_dim
    made = linear(tape, sizes, "attention", for_q, seen, queries, width)
    q = tape.add("attention", seen * queries * item, made, forward=seen * queries * item)
    if config.rope.scaling == "yarn":
        q = tape.add("attention", seen * queries * item, q)
    up = heads * (latent.nope_dim + latent.value_dim)
    kv = linear(tape, sizes, "attention", for_kv, seen, up, latent.kv_rank)
    k = tape.add("attention", seen * queries * item, kv, both, forward=seen * latent.rope_dim * 2 * sizes.wide)
    out = inner(tape, sizes, (q, k, kv), heads, heads, latent.head_dim, latent.value_dim, 0)
    out = linear(tape, sizes, "attention", out, seen, config.dim, heads * latent.value_dim, config.output_bias)
    return scatter(tape, sizes, "attention", out, ordered=True)


def inner(
    tape: Tape, sizes: Sizes, qkv: tuple[int, int, int], heads: int, keys: int, width: int, values: int, window: int
) -> int:
    """Softmax attention over what context parallelism lets the rank see."""
    q, k, v = qkv
    item, wide, cp = sizes.item, sizes.wide, sizes.mesh.cp
    queries, pair = sizes.seen * heads * width, 2 * sizes.seen * keys * width
    sums = sizes.seen * heads * (8 if item == 8 else 4)
    out = sizes.seen * heads * (values if cp == 1 else width) * item
    narrowed = 0 < window < sizes.length
    if cp == 1:
        area = sizes.length * sizes.length
        area *= sizes.batch if sizes.masked else 1 if narrowed else 0
        if sizes.config.sinks:  # masks become numbers anew in the backward pass; a copy brings heads in order
            mixed = tape.add(
                "attention",
                out,
                q,
                k,
                v,
                keep=(q, k, v, SELF),
                extra=sums,
                forward=out + area * item,
                backward=area * item,
            )
            return tape.add("attention", out, mixed)
        if values != width and not sizes.accelerator:  # no CPU kernel has values of another width: all scores exist
            scores = sizes.seen * heads * sizes.length * wide
            extra = scores + (queries + pair // 2) * wide + out
            mixed = tape.add("attention", out, q, k, v, extra=extra, forward=scores, backward=2 * scores)
            return tape.add("attention", out, mixed)
        extra = sums + area * item
        return tape.add("attention", out, q, k, v, keep=(q, k, v, SELF), extra=extra, product=True)
    if sizes.context == "ulysses":
        rows_here = (queries + pair) * item
        joined = tape.add("attention", rows_here, q, k, v, forward=2 * rows_here, backward=2 * rows_here)
        area = sizes.seq_len**2 * (sizes.batch if sizes.masked else 1 if narrowed else 0) * item
        mixed = tape.add(
            "attention", out, joined, keep=(joined, SELF), extra=sums + area, backward=rows_here, product=True
        )
        return tape.add("attention", out, mixed, forward=2 * out, backward=2 * out)
    merged = 3 * queries * wide
    if sizes.context == "all_gather":
        row = pair * cp
        forward = max(2 * row * item + pair * item, row * item + merged)
        backward = row * item + 2 * row * wide + queries * (wide + item) + max(2 * row * wide, queries * wide)
    else:
        forward, backward = 2 * pair * item + merged, 2 * pair * item + 4 * pair * wide + 2 * queries * wide
    return tape.add("attention", out, q, k, v, keep=(q, k, v, SELF), extra=sums, forward=forward, backward=backward)


def swiglu(tape: Tape, sizes: Sizes, x: int, tokens: int, ffn: int, part: str) -> int:
    """x [tokens, D] -> [tokens, D], by the rank's part of the hidden width."""
    config, item = sizes.config, sizes.item
    gate = linear(tape, sizes, part, x, tokens, ffn, config.dim, config.mlp_bias)
    up = linear(tape, sizes, part, x, tokens, ffn, config.dim, config.mlp_bias)
    activated = tape.add(part, tokens * ffn * item, gate, keep=(gate,))
    inside = tape.add(part, tokens * ffn * item, activated, up, keep=(activated, up))
    return linear(tape, sizes, part, inside, tokens, config.dim, ffn, config.mlp_bias)


def mlp(tape: Tape, sizes: Sizes, x: int) -> int:
    """The normed hidden states -> what a dense feed-forward layer adds to them."""
    tp = sizes.mesh.tp
    x = gather(tape, sizes, "mlp", x, sizes.config.dim, ordered=False)
    out = swiglu(tape, sizes, x, sizes.seen, sizes.config.ffn // tp, "mlp")
    return scatter(tape, sizes, "mlp", out, ordered=False)


def head(tape: Tape, sizes: Sizes, x: int, chunk: int) -> int:
    """Hidden states -> the loss: last norm, head, cross-entropy."""
    config, tp, item, wide = sizes.config, sizes.mesh.tp, sizes.item, sizes.wide
    vocab, seen = rows(config.vocab_size, tp), sizes.seen
    x = norm(tape, sizes, x, sizes.tokens * config.dim, config.dim)
    x = gather(tape, sizes, "head", x, config.dim, ordered=True)
    if chunk:
        return _chunked_head(tape, sizes, x, vocab, min(chunk, seen))
    logits = linear(tape, sizes, "head", x, seen, vocab, config.dim)
    size = seen * vocab * wide
    cast = size if item < 4 else 0
    if tp > 1:
        return tape.add("head", wide, logits, extra=size, backward=cast)
    own = seen * vocab * item if cast else 0  # of logits: its gradient is there once that of the softmax has gone
    return tape.add("head", wide, logits, extra=size, forward=cast, backward=size + cast - own)


def _chunked_head(tape: Tape, sizes: Sizes, x: int, vocab: int, chunk: int) -> int:
    """`models.loss.chunked_loss`: gradients of hidden states and weight are computed along with the loss, and kept."""
    item, wide, seen, dim = sizes.item, sizes.wide, sizes.seen, sizes.config.dim
    logits, hidden, weight = chunk * vocab, seen * dim, vocab * dim
    cast, total = item < 4, weight * wide
    before = total if chunk < seen else 0  # chunks after the first find a gradient of the weight
    of_loss = logits * (item + (2 if sizes.mesh.tp > 1 else 3) * wide) + before
    of_weight = logits * item + weight * item + (before if not cast else before + total)
    return tape.add(
        "head",
        wide,
        x,
        extra=hidden * item + total,
        weight=weight * item,
        forward=hidden * item + max(of_loss, of_weight),
        backward=max(2 * hidden, weight) * wide if cast else 0,
    )
