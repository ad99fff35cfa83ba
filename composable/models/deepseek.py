"""How DeepSeek's config.json tell what several of our fields make: widths of heads, shared experts, groups."""

from collections.abc import Mapping
from typing import Any

from composable.models.config import DecoderConfig, LatentConfig
from composable.moe.config import MoEConfig


def told(config: DecoderConfig) -> dict[str, Any]:
    """Ours -> theirs, of V2 and V3: `head_dim` is what rotary embedding turns, shared experts are counted."""
    assert config.latent is not None
    assert config.moe is not None
    shared = config.moe.shared_ffn // config.moe.ffn  # a model of either family has one at least
    return {"head_dim": config.latent.rope_dim, "n_shared_experts": max(shared, 1)}


def heard(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json -> ours, of V2 and V3."""
    parts = (("qk_nope_head_dim", LatentConfig.nope_dim), ("qk_rope_head_dim", LatentConfig.rope_dim))
    shared = (config.get("n_shared_experts") or 0) * config.get("moe_intermediate_size", MoEConfig.ffn)
    return {"head_dim": sum(config.get(key, absent) for key, absent in parts), "moe.shared_ffn": shared}


def told_of_v2(config: DecoderConfig) -> dict[str, Any]:
    """Ours -> theirs, of V2: whether a token chooses among groups is said beside them."""
    assert config.moe is not None
    grouped = config.moe.groups_kept < config.moe.groups
    return {**told(config), "topk_method": "group_limited_greedy" if grouped else "greedy"}


def heard_of_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json -> ours, of V2.

    Raises:
        ValueError: another way to choose experts.
    """
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"config.json: topk_method={method!r} is not supported; supported are 'greedy' and 'group_limited_greedy'"
        )
    groups = {"moe.groups": 1, "moe.groups_kept": 1} if method == "greedy" else {"moe.group_score": "max"}
    return {**heard(config), **groups}
