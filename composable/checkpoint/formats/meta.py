"""Meta's `consolidated.*.pth` with `params.json`: Llama 2 and 3, cut for tensor parallelism, under names of their own.

Each file is a state dict with one rank's part of every tensor. Rows of q and k lie in the order of rotary pairs (2i,
2i + 1); ours, as Hugging Face's, has the first halves of a head's pairs before the second ones (Su et al. 2021,
arXiv:2104.09864, has the pairs; `transformers` the halves).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable.checkpoint.format import Part, Place, Stored, TensorSpec
from composable.checkpoint.formats.source import Entry, Source, computed_entry, stored_entries
from composable.checkpoint.formats.torch_file import loaded
from composable.checkpoint.owners import check_cover
from composable.checkpoint.region import read_region
from composable.checkpoint.rewrite import small_files
from composable.checkpoint.shards import Box

FILES, PARAMS = "consolidated.*.pth", "params.json"
LEFT_OUT = (PARAMS, "checklist.chk")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_NAMES: Mapping[str, tuple[str, int | None]] = {  # theirs -> ours, and the dimension that is cut (None: whole in each)
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
_ENDS: Mapping[str, tuple[str, int | None]] = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 0),  # Llama 2 cuts it along 1: see `_cut`
    "output.weight": ("lm_head.weight", 0),
    "norm.weight": ("model.norm.weight", None),
}
_COMPUTED = ("rope.freqs",)
# params.json of Llama 3.1 (factor 8) and of Llama 3.2 1B and 3B (factor 32: https://github.com/meta-llama/llama-models/
# issues/241) do not tell the factor. These two are as wide as no model of 3.1.
WIDTHS_OF_3_2 = (2048, 3072)
_KNOWN = (  # keys of params.json that we read, or that have no say in what is computed
    *("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor"),
    *("vocab_size", "multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size", "model_parallel_size"),
)


def is_one(folder: Path) -> bool:
    """Whether there are such files."""
    return any(folder.glob(FILES))


def source(folder: Path) -> Source:
    """All parts as one model, its config.json made of params.json (or the one that lies there).

    Raises:
        ValueError: naming the file, for params.json that is missing or tells of another model; for tensors of names or
            shapes that are none of Llama's, and parts of which one is missing.
    """
    params = _params(folder / PARAMS)
    files = sorted(path.name for path in folder.glob(FILES))
    if files != [f"consolidated.{rank:02d}.pth" for rank in range(len(files))]:
        raise ValueError(f"{folder} holds {', '.join(files)}: a part is missing; copy the folder again")
    parts = [_part_of(folder, file) for file in files]
    for file, part in zip(files, parts, strict=True):
        if odd := sorted(part.keys() ^ parts[0].keys()):
            raise ValueError(
                f"{odd[0]} is in one of {folder / file} and {folder / files[0]} only; copy the folder again"
            )
    weights: dict[str, Entry] = {}
    for theirs in parts[0]:
        if theirs not in _COMPUTED:
            name, dim = _ours(folder, theirs)
            weights[name] = _whole(folder, name, _cut(theirs, dim, parts, params), [part[theirs] for part in parts])
    heads, kv_heads = params["n_heads"], params.get("n_kv_heads") or params["n_heads"]
    for name, entry in weights.items():
        if (of := {"q_proj": heads, "k_proj": kv_heads}.get(name.rsplit(".", 2)[-2])) is not None:
            weights[name] = _unpaired(folder, name, entry, of, params["dim"] // heads)
    small = {name: content for name, content in small_files(folder, None).items() if name not in LEFT_OUT}
    if "config.json" not in small:
        small["config.json"] = (json.dumps(_config(folder, params, weights), indent=2) + "\n").encode()
    kind = f"Meta's checkpoint in {len(files)} part{'s' * (len(files) > 1)}"
    return Source(kind, {"weights": weights, "optimizer": {}}, small)


def _params(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: it tells the model's heads, without which parts cannot be joined")
    try:
        params = dict(json.loads(path.read_bytes()))
        for key in ("dim", "n_layers", "n_heads"):
            if type(params[key]) is not int or params[key] < 1:
                raise ValueError(f"{key} is {params[key]!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not tell of a Llama model: {error!r}") from error
    if odd := sorted(params.keys() - set(_KNOWN)):
        raise ValueError(f"{path} tells of {', '.join(odd)}, which Llama 2 and 3 have not: it is another model")
    return params


def _part_of(folder: Path, file: str) -> dict[str, Entry]:
    found = loaded(folder, file)
    if not isinstance(found, dict) or not all(isinstance(entry, Entry) and entry.row_major for entry in found.values()):
        raise ValueError(f"{folder / file} is no state dict of row-major tensors")
    return found


def _ours(folder: Path, name: str) -> tuple[str, int | None]:
    match = _LAYER.fullmatch(name)
    if name in _ENDS:
        return _ENDS[name]
    if not match or match[2] not in _NAMES:
        raise ValueError(f"{folder} holds {name}, which is no tensor of Llama 2 or 3")
    ours, dim = _NAMES[match[2]]
    return f"model.layers.{match[1]}.{ours}.weight", dim


def _cut(name: str, dim: int | None, parts: Sequence[Mapping[str, Entry]], params: Mapping[str, Any]) -> int | None:
    """The dimension along which a tensor is cut: of the embedding, the one that makes it the model's width."""
    if name == "tok_embeddings.weight" and parts[0][name].spec.shape[-1] != params["dim"]:
        return 1
    return dim


def _whole(folder: Path, name: str, dim: int | None, parts: Sequence[Entry]) -> Entry:
    """One tensor of its parts, one after the other along `dim`; of what is whole in each file the first."""
    first, places, at = parts[0].spec, [], 0
    if dim is None or len(parts) == 1:
        spec = TensorSpec(name, first.dtype, first.shape)
        return stored_entries(folder, {name: Stored(spec, tuple(_named(place, name) for place in parts[0].places))})[
            name
        ]
    shape = list(first.shape)
    shape[dim] = sum(part.spec.shape[dim] for part in parts)
    for part in parts:
        offsets = [0] * len(shape)
        offsets[dim] = at
        at += part.spec.shape[dim]
        places += [_named(place, name, Part(name, tuple(shape), tuple(offsets))) for place in part.places]
    spec = TensorSpec(name, first.dtype, tuple(shape))
    try:
        check_cover(spec, [place.box for place in places])
    except ValueError as error:
        raise ValueError(
            f"the parts of {name} in {folder} do not make up a tensor of shape {spec.shape}: {error}"
        ) from error
    return stored_entries(folder, {name: Stored(spec, tuple(places))})[name]


def _named(place: Place, name: str, part: Part | None = None) -> Place:
    return Place(place.file, place.offset, TensorSpec(name, place.spec.dtype, place.spec.shape), part)


def _unpaired(folder: Path, name: str, entry: Entry, heads: int, head_dim: int) -> Entry:
    """Rows of q or k in our order."""
    if entry.spec.shape[0] != heads * head_dim:
        raise ValueError(
            f"{name} has {entry.spec.shape[0]} rows in all parts of {folder}, and {PARAMS} {heads} heads of "
            f"{head_dim}: parts that repeat heads are not supported"
        )
    stored = Stored(entry.spec, entry.places)

    def read(box: Box) -> Tensor:
        row = torch.arange(box.offsets[0], box.offsets[0] + box.sizes[0])
        head, half, pair = row // head_dim, row % head_dim // (head_dim // 2), row % (head_dim // 2)
        theirs = head * head_dim + 2 * pair + half
        start, end = int(theirs.min()), int(theirs.max()) + 1
        outer = Box((start, *box.offsets[1:]), (end - start, *box.sizes[1:]))
        return read_region(folder, stored, outer)[theirs - start]

    return computed_entry(entry.spec, read, entry.places, share=4)


def _config(folder: Path, params: Mapping[str, Any], weights: Mapping[str, Entry]) -> dict[str, Any]:
    """The content of config.json, as Hugging Face has it for the family."""
    dim, heads = params["dim"], params["n_heads"]
    try:
        vocabulary, width = weights["model.embed_tokens.weight"].spec.shape
        ffn = weights["model.layers.0.mlp.gate_proj.weight"].spec.shape[0]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder} lacks {error} of Llama's tensors") from error
    if width != dim or dim % heads:
        raise ValueError(f"{folder / PARAMS} has dim {dim} and {heads} heads, and the embedding is {width} wide")
    scaled = bool(params.get("use_scaled_rope"))
    newer = "rope_theta" in params and params["rope_theta"] > 10000
    scaling = {
        "rope_type": "llama3",
        "factor": float(params.get("rope_scaling_factor") or (32.0 if dim in WIDTHS_OF_3_2 else 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dtype = weights["model.embed_tokens.weight"].spec.dtype
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "head_dim": dim // heads,
        "hidden_act": "silu",
        "max_position_embeddings": params.get("max_seq_len", 131072 if scaled else 8192 if newer else 4096),
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": float(params.get("rope_theta", 10000.0)),
        "rope_scaling": scaling if scaled else None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
