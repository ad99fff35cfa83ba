"""How families' config.json tell which layers have a window, and how wide it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composable.models.config import DecoderConfig

WINDOW, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Windows:
    """A family's manner, as `transformers` reads it."""

    absent: int | None
    """what the absence of `sliding_window` means"""
    switch: bool = False
    """`use_sliding_window` must be there and true"""
    pattern: Callable[[Mapping[str, Any], int], bool] | None = None
    """(config.json, layer) -> whether it has the window where `layer_types` does not say; None: every layer has it"""

    def told(self, config: DecoderConfig) -> dict[str, Any]:
        """Ours -> what config.json has of it."""
        window = config.window or None
        out: dict[str, Any] = {}
        if self.switch:
            out["use_sliding_window"] = window is not None
        if window or not self.switch:  # a width must be there also where no layer has one
            out["sliding_window"] = window or (self.absent if self.pattern else None)
        if self.pattern is None or (self.switch and not window):
            return out
        chosen = [bool(config.window_of(layer)) for layer in range(config.layers)]
        if self.switch:
            out["max_window_layers"] = chosen.index(True)  # what older readers take: those from there on
        return out | {"layer_types": [WINDOW if has else FULL for has in chosen]}

    def heard(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json -> ours.

        Raises:
            ValueError: `layer_types` of another kind, or for another number of layers.
        """
        on = not self.switch or config.get("use_sliding_window")
        window = config.get("sliding_window", self.absent) if on else None
        if not window:
            return {"window": 0}
        if self.pattern is None:
            return {"window": window}
        layers = range(config["num_hidden_layers"])
        types = config.get("layer_types") or [WINDOW if self.pattern(config, layer) else FULL for layer in layers]
        if unknown := sorted(set(types) - {WINDOW, FULL}):
            raise ValueError(f"config.json: layer_types has {', '.join(unknown)}; supported are {WINDOW} and {FULL}")
        if len(types) != len(layers):
            raise ValueError(f"config.json: layer_types tells of {len(types)} layers, and there are {len(layers)}")
        chosen = tuple(layer for layer in layers if types[layer] == WINDOW)
        if not chosen:
            return {"window": 0}
        return {"window": window, "window_layers": chosen if len(chosen) < len(layers) else ()}


def above(config: Mapping[str, Any], layer: int) -> bool:
    """The layers from `max_window_layers` on (Qwen2, Qwen3)."""
    return layer >= config.get("max_window_layers", 28)


def every_other_below(config: Mapping[str, Any], layer: int) -> bool:
    """The even layers below `max_window_layers` (Qwen2-MoE)."""
    return layer % 2 == 0 and layer < config.get("max_window_layers", 28)


def every_other(config: Mapping[str, Any], layer: int) -> bool:
    """The even layers (gpt-oss)."""
    return layer % 2 == 0


MISTRAL = Windows(absent=4096)
MIXTRAL = Windows(absent=None)
QWEN = Windows(absent=4096, switch=True, pattern=above)
QWEN2_MOE = Windows(absent=4096, switch=True, pattern=every_other_below)
QWEN3_MOE = Windows(absent=4096, switch=True)
GPT_OSS = Windows(absent=128, pattern=every_other)
