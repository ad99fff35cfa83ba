"""What people watch of layers with experts: how evenly tokens are spread, a picture of it, and when it collapses."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from composable.observe.metrics import MetricsWriter

PICTURE_SCALE = 4.0
"""the load, in units of the mean, that a picture shows brightest; the same in every picture, so that they compare"""
PICTURE_TAG = "moe/load (layers down, experts across; dark: none, bright: 4 x mean or more)"
CELL = 8, 32
"""least and largest pixels of a cell of the picture"""
NAMED = 8
"""experts that a warning names at most"""
VIRIDIS = (
    (0x44, 0x01, 0x54),
    (0x48, 0x25, 0x76),
    (0x41, 0x44, 0x87),
    (0x35, 0x60, 0x8D),
    (0x2A, 0x78, 0x8E),
    (0x21, 0x90, 0x8C),
    (0x22, 0xA8, 0x84),
    (0x43, 0xBF, 0x71),
    (0x7A, 0xD1, 0x51),
    (0xBB, 0xDF, 0x27),
    (0xFD, 0xE7, 0x25),
)
"""RGB of the colour map viridis at eleven equal distances: equal steps of a value look equally large"""


@dataclass(frozen=True)
class RoutingWatch:
    """Over how much of the run the load of experts is looked at, and what is warned of."""

    window: int = 20
    """reports (lines of metrics.jsonl) over which loads are summed. An overload is warned of once a quarter of them is
    there, an expert without tokens once all of them are"""
    max_load: float = 4.0
    """load of an expert over the window, in units of the mean, above which it is warned of. It can be experts / top_k
    at most (every token chooses the expert), so the limit is never more than halfway from 1 to that: 2.5 for 8 experts
    of which 2 are chosen"""
    dead: float = 0.0
    """share of a layer's experts that may go without a token over the window before it is warned of"""
    pictures: int = 10
    """reports between pictures and histograms of the load in TensorBoard"""

    def __post_init__(self) -> None:
        for name in ("window", "pictures"):
            if getattr(self, name) < 1:
                raise ValueError(f"observe.routing.{name}={getattr(self, name)}: it is a number of reports, 1 or more")
        if self.max_load <= 1:
            raise ValueError(
                f"observe.routing.max_load={self.max_load}: 1 is the load of balanced experts; write more, such as 4"
            )
        if not 0 <= self.dead <= 1:
            raise ValueError(
                f"observe.routing.dead={self.dead}: it is a share of experts, from 0 (none may be without tokens) to 1"
            )


@dataclass(frozen=True, eq=False)
class RoutingReport:
    """The routing of one or more whole steps, over all ranks; tensors on the CPU.

    Raises:
        ValueError: shapes or names that do not go together.
    """

    layers: tuple[int, ...]
    """global indices of the L layers with experts"""
    top_k: int
    """experts that a token chooses"""
    chosen: Tensor
    """[L, E] int64 choices of each expert before any drop, padding left out"""
    executed: Tensor
    """[L, E] int64 choices of each expert that were executed"""
    losses: dict[str, Tensor]
    """[L] by name ("switch"), before coefficients"""
    coefficients: dict[str, float]
    """of the same names"""
    bias: Tensor | None = None
    """[L, E] score-correction bias; None: the router has none"""

    def __post_init__(self) -> None:
        rows = len(self.layers)
        tables = {"chosen": self.chosen, "executed": self.executed}
        if self.bias is not None:
            tables["bias"] = self.bias
        for name, table in tables.items():
            if table.dim() != 2 or table.shape != self.chosen.shape or len(table) != rows:
                raise ValueError(
                    f"{name} {list(table.shape)} of a report on layers {self.layers}: give [{rows}, experts] for each"
                )
        if self.losses.keys() != self.coefficients.keys():
            raise ValueError(
                f"losses {sorted(self.losses)} with coefficients {sorted(self.coefficients)}: give one for each loss"
            )
        for name, loss in self.losses.items():
            if loss.shape != (rows,):
                raise ValueError(f"loss {name!r} {list(loss.shape)} of a report on {rows} layers: give [{rows}]")


def scalars(report: RoutingReport, lately: Tensor | None = None) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl: `moe/layer_<i>/<name>` of each layer, and `moe/<name>` in total.

    | name | of a layer | in total |
    |---|---|---|
    | `max_load` | largest / mean choices of an expert: 1 if balanced, at most experts / top_k | the largest |
    | `entropy` | of the load, in units of log(experts): 1 if balanced, 0 if one expert gets all | mean |
    | `dropped` | share of the choices that were not executed | of all choices |
    | `dead` | share of the experts that executed nothing | of all experts |
    | `<loss>_loss` | before its coefficient | mean |
    | `<loss>_loss_scaled` | times its coefficient | sum: what it adds to the model's loss |
    | `bias_min`, `bias_max` | of the score-correction bias | smallest, largest |

    What does not exist (the load of a layer without tokens) or is not finite is left out.

    Args:
        lately: [L, E] executed choices over a longer time, for `dead`: `LoadWindow.executed`; None: the report's own.
    """
    dead = (report.executed if lately is None else lately).eq(0).double().mean(1).tolist()
    chosen, executed = report.chosen.tolist(), report.executed.sum(1).tolist()
    layers: list[dict[str, float]] = []
    for row, counts in enumerate(chosen):
        values = {"dead": dead[row]}
        if total := sum(counts):
            values["max_load"] = max(counts) * len(counts) / total
            values["entropy"] = entropy(counts)
            values["dropped"] = (total - executed[row]) / total
        for name, loss in report.losses.items():
            values[f"{name}_loss"] = loss[row].item()
            values[f"{name}_loss_scaled"] = report.coefficients[name] * loss[row].item()
        if report.bias is not None:
            values["bias_min"], values["bias_max"] = (edge.item() for edge in report.bias[row].aminmax())
        layers.append({name: value for name, value in values.items() if math.isfinite(value)})
    out = {f"moe/{name}": value for name, value in _totals(layers).items()}
    if total := int(report.chosen.sum()):
        out["moe/dropped"] = (total - sum(executed)) / total
    for layer, values in zip(report.layers, layers, strict=True):
        out |= {f"moe/layer_{layer}/{name}": value for name, value in values.items()}
    return out


def entropy(counts: list[int]) -> float:
    """Of the load, in units of log(experts): 1 if balanced (also a single expert), 0 if one of several gets all.

    Raises:
        ValueError: no counts above 0.
    """
    total = sum(counts)
    if not total:
        raise ValueError(f"the entropy of {counts}: without a choice there is no load")
    if len(counts) == 1:
        return 1.0
    nats = math.fsum(count / total * math.log(total / count) for count in counts if count)
    return min(nats / math.log(len(counts)), 1.0)


def load(counts: Tensor) -> Tensor:
    """counts [L, E] -> [L, E] float64 in units of the layer's mean; 0 in a layer without any."""
    return counts.double() * counts.size(1) / counts.sum(1, keepdim=True).clamp(min=1)


def heat_map(loads: Tensor) -> Tensor:
    """A picture of loads [L, E] (units of the mean): [3, H, W] uint8, the first layer on top, the first expert left.

    From dark violet (no tokens) over blue and green to yellow (`PICTURE_SCALE` times the mean, and beyond); the mean
    itself is blue. A cell is a square of `CELL` pixels, larger where there are few.
    """
    place = (loads.double() / PICTURE_SCALE).clamp(0, 1) * (len(VIRIDIS) - 1)
    colours = torch.tensor(VIRIDIS, dtype=torch.float64)  # [N, 3]
    below = place.floor().clamp(max=len(VIRIDIS) - 2).long()
    pixels = torch.lerp(colours[below], colours[below + 1], (place - below)[..., None])  # [L, E, 3]
    size = min(max(512 // max(loads.shape), CELL[0]), CELL[1])
    cells = pixels.round().to(torch.uint8).permute(2, 0, 1)
    return cells.repeat_interleave(size, 1).repeat_interleave(size, 2)


def draw(metrics: MetricsWriter, counts: Tensor, layers: tuple[int, ...], step: int) -> None:
    """Show counts [L, E] in TensorBoard: a histogram of each layer with a bar per expert, and the heat map."""
    for layer, row in zip(layers, counts, strict=True):
        metrics.histogram(f"moe/layer_{layer}/load", row, step)
    metrics.image(PICTURE_TAG, heat_map(load(counts)), step)


class LoadWindow:
    """The last reports of a run: sums over them, and what is to be warned of."""

    def __init__(self, watch: RoutingWatch) -> None:
        self.watch = watch
        self.reports = 0
        """reports ever added"""
        self._kept: deque[RoutingReport] = deque(maxlen=watch.window)
        self._said: dict[tuple[int, str], int] = {}  # (layer, what): experts that the last warning was about

    def add(self, report: RoutingReport) -> None:
        """Take in the newest report; beyond `watch.window` the oldest goes."""
        self._kept.append(report)
        self.reports += 1

    @property
    def chosen(self) -> Tensor:
        """[L, E] choices of each expert over the window."""
        return torch.stack([report.chosen for report in self._kept]).sum(0)

    @property
    def executed(self) -> Tensor:
        """[L, E] executed choices of each expert over the window."""
        return torch.stack([report.executed for report in self._kept]).sum(0)

    @property
    def picture_due(self) -> bool:
        """Whether the newest report is one of those that are drawn: the first, and each `watch.pictures`-th."""
        return self.reports == 1 or self.reports % self.watch.pictures == 0

    def collapse(self) -> list[str]:
        """Warnings, one for each layer where experts are overloaded or without tokens; call it once after each `add`.

        A layer's warning comes once: again only when it is about twice as many experts, or after a recovery. From an
        overload a layer has recovered when its largest load is halfway back from the limit to 1.
        """
        if len(self._kept) < max(1, self.watch.window // 4):
            return []
        newest = self._kept[-1]
        loads, executed = load(self.chosen), self.executed
        experts = loads.size(1)
        limit = min(self.watch.max_load, (1 + experts / newest.top_k) / 2)
        full, warnings = len(self._kept) == self.watch.window, []
        for row, layer in enumerate(newest.layers):
            hot = _where(loads[row] > limit)
            calm = loads[row].max().item() <= (1 + limit) / 2
            dead = _where(executed[row] == 0) if full and executed[row].any() else []
            if len(dead) <= self.watch.dead * experts:
                dead = []
            # Both are noted, whatever the first one says.
            news = [self._news(layer, "hot", len(hot), calm), self._news(layer, "dead", len(dead), not dead)]
            if any(news):
                faults = _faults(loads[row].tolist(), hot, dead, len(self._kept))
                warnings.append(f"layer {layer}: {faults}; {_advice(newest)}")
        return warnings

    def _news(self, layer: int, what: str, count: int, recovered: bool) -> bool:
        """Whether a warning about `count` experts is due; notes that it is given."""
        if recovered:
            self._said.pop((layer, what), None)
            return False
        if count < max(1, 2 * self._said.get((layer, what), 0)):
            return False
        self._said[layer, what] = count
        return True


def _totals(layers: list[dict[str, float]]) -> dict[str, float]:
    """Over all layers that have the number."""
    out = {}
    for name in dict.fromkeys(name for values in layers for name in values):
        column = [values[name] for values in layers if name in values]
        if name in ("max_load", "bias_max"):
            out[name] = max(column)
        elif name == "bias_min":
            out[name] = min(column)
        elif name.endswith("_scaled"):
            out[name] = math.fsum(column)
        else:
            out[name] = math.fsum(column) / len(column)
    return out


def _where(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _faults(loads: list[float], hot: list[int], dead: list[int], reports: int) -> str:
    """What is wrong with a layer whose experts have `loads` in units of the mean."""
    experts, parts = len(loads), []
    if hot:
        hot = sorted(hot, key=lambda expert: -loads[expert])
        shares = _listed(f"{100 * loads[expert] / experts:.3g}%" for expert in hot)
        verb = "takes" if len(hot) == 1 else "take"
        parts.append(
            f"{_named(hot)} {verb} {shares} of all choices ({experts} experts; even would be {100 / experts:.3g}%)"
        )
    if dead:
        parts.append(f"{_named(dead)} got none")
    over = "last report" if reports == 1 else f"last {reports} reports"
    return f"{', '.join(parts)} in the {over}"


def _advice(report: RoutingReport) -> str:
    balancing = [name for name in report.coefficients if name != "z"]
    if balancing:
        wishes = [f"raise model.moe.balance.{name} ({report.coefficients[name]:g})" for name in balancing]
    else:
        wishes = ["set model.moe.balance.switch (0.01, say)"]
    if report.bias is None:
        wishes.append("set model.moe.correction with model.moe.balance.bias_rate (0.001, say)")
    else:
        wishes.append("raise model.moe.balance.bias_rate")
    return " or ".join(wishes)


def _named(experts: list[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {_listed(experts)}"


def _listed(items: Iterable[object]) -> str:
    texts = [str(item) for item in items]
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
