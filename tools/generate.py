"""Let a model write: `python tools/generate.py CKPT --prompt "Once upon"`, or on N ranks `torchrun --nproc-per-node N`.

CKPT is a checkpoint, a Hugging Face folder, or a run folder, whose newest complete checkpoint is taken. Ranks share the
model by tensor parallelism, and its experts by expert parallelism. The text goes to standard output as it is made, the
rest to standard error. Greedy with --temperature 0. Experts take every token, whatever capacity they were trained with.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tokenizers
import torch
import torch.distributed as dist
import tyro

from composable.checkpoint.budget import size_text
from composable.checkpoint.folder import latest
from composable.checkpoint.remote import Folder, as_folder
from composable.checkpoint.together import together
from composable.data.chat import question_encoder
from composable.data.loader import DataConfig
from composable.data.text import Tokenizer, load_tokenizer
from composable.mesh import Mesh, distributed
from composable.models.config import DecoderConfig
from composable.models.count import count_parameters
from composable.models.families import from_hugging_face
from composable.models.generate import Sampling, stream
from composable.moe.config import Capacity, Exploration
from composable.recipe import Recipe
from composable.start import start_from
from composable.train import build_model

WIDTH = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Args:
    """Let a model write."""

    ckpt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")]
    """A checkpoint, a Hugging Face folder, or a run folder; the first two may be URLs."""
    prompt: str = ""
    """What is continued."""
    prompt_file: str = ""
    """A file that holds it instead; - reads standard input."""
    tokens: int | None = None
    """Most tokens to write; 128, or what the context has room for, if not given. The token that ends a text ends it."""
    temperature: float = 0.8
    """Of the softmax; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens whose probabilities together reach this."""
    seed: int = 0
    """Of the draws."""
    template: str = ""
    """The prompt is what a user says, written by: tokenizer (its own chat template), chatml, llama3, plain, or a Jinja
    file, as `prepare_data.py` has it; otherwise it is a text that goes on."""
    system: str = ""
    """What stands before it, with --template."""
    ignore_eos: bool = False
    """Go on after the token that ends a text."""
    cache: bool = True
    """Keep keys and values of what was seen; without, every token costs a pass over all before it."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Of weights and computation; that of config.json if not given."""
    tokenizer: str = ""
    """byte, a tokenizer.json or a folder with one; CKPT's own if not given."""
    plan: bool = False
    """Print what would be read, and how much memory it takes, and read nothing."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = tyro.cli(Args, args=arguments, description=__doc__)
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
        with distributed() as device:
            folder, text = checkpoint(args.ckpt), prompt_of(args)
            config = configuration(folder)
            recipe, tokenizer = recipe_of(args, folder, config), tokenizer_of(args, folder)
            prompt = encoded(args, folder, tokenizer, text, config)
            count = tokens_to_write(args, prompt, config)
            if args.plan:
                print("\n".join(plan_lines(folder, recipe, len(prompt) + count)) if dist.get_rank() == 0 else "")
                return 0
            write(args, folder, recipe, tokenizer, prompt, count, sampling, device)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write(
    args: Args,
    folder: Folder,
    recipe: Recipe,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    most: int,
    sampling: Sampling,
    device: torch.device,
) -> None:
    """Read the model, write the text as it comes, and say how fast it came."""
    began = time.perf_counter()
    model = build_model(recipe, device)
    remarks = start_from(folder, recipe, model)
    note([*remarks, f"read {folder} in {time.perf_counter() - began:.1f} s"])
    began = time.perf_counter()
    made = stream(
        model.parts[0],
        torch.tensor(prompt, device=device),
        most,
        sampling,
        context=recipe.model.max_length,
        seed=args.seed,
        stop=() if args.ignore_eos else ends_of(folder, tokenizer),
        cache=args.cache,
    )
    count, first = 0, began
    for piece in spelled(tokenizer, prompt, made):
        if not count:
            first = time.perf_counter()
        count += 1
        if dist.get_rank() == 0:
            print(piece, end="", flush=True)
    if dist.get_rank() == 0:
        print(flush=True)
    rate = f", then {(count - 1) / (time.perf_counter() - first):.1f} a second" if count > 1 else ""
    note([f"{len(prompt)} tokens read and the first written in {first - began:.2f} s{rate}"])


def spelled(tokenizer: Tokenizer, prompt: Sequence[int], made: Iterator[int]) -> Iterator[str]:
    """What each token adds to the text; a character of several tokens comes with its last one."""
    ids, shown = list(prompt), tokenizer.decode(list(prompt))
    for token in made:
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(shown):
            yield ""
            continue
        yield text[len(shown) :]
        shown = text


def note(lines: Sequence[str]) -> None:
    """Lines for who watches, on rank 0."""
    if dist.get_rank() == 0:
        print("\n".join(lines), file=sys.stderr, flush=True)


def checkpoint(name: str) -> Folder:
    """The folder itself if it holds a model, else its newest checkpoint."""
    folder = as_folder(name)
    if (folder / "config.json").is_file():
        return folder
    runs = [folder, folder / "checkpoints"]
    found = next((found for run in runs if run.is_dir() and (found := latest(run)) is not None), None)
    if found is None:
        raise ValueError(f"{name} holds neither a model (config.json and safetensors files) nor complete checkpoints")
    return as_folder(str(found))


def configuration(folder: Folder) -> DecoderConfig:
    """What the model computes: no token is dropped, and no router explores."""
    try:
        config = from_hugging_face(json.loads((folder / "config.json").read_bytes()))
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'} is no model's configuration: {error!r}") from error
    if config.moe is None:
        return config
    plain = dataclasses.replace(
        config.moe, capacity=Capacity(), exploration=Exploration(), dispatcher="all_to_all", upcycle=False
    )
    return dataclasses.replace(config, moe=plain)


def recipe_of(args: Args, folder: Folder, config: DecoderConfig) -> Recipe:
    """The model on all ranks; refuses degrees that they cannot share it with."""
    world = dist.get_world_size()
    told = json.loads((folder / "config.json").read_bytes())
    dtype = args.dtype or told.get("dtype") or told.get("torch_dtype") or "float32"
    recipe = Recipe(
        "generate",
        config,
        dtype=dtype if dtype in WIDTH else "bfloat16",
        mesh=Mesh(dp_shard=1, tp=world, ep=1 if config.moe is None else world),
        data=DataConfig(seq_len=world, micro_batch=1, global_batch=1),
    )
    return recipe.resolve(world)[0]


def tokenizer_of(args: Args, folder: Folder) -> Tokenizer:
    """The named one, or the checkpoint's."""
    if args.tokenizer:
        return load_tokenizer(args.tokenizer)
    if isinstance(folder, Path) and (folder / "tokenizer.json").is_file():
        return load_tokenizer(str(folder))
    state = folder / "train_state.json"
    told = json.loads(state.read_bytes()) if state.is_file() else {}
    data = told.get("data") if isinstance(told, dict) else None
    if isinstance(data, dict) and data.get("tokenizer") == "byte":
        return load_tokenizer("byte")
    raise ValueError(f"{folder} has no tokenizer.json that can be read here; name one as --tokenizer (or byte)")


def prompt_of(args: Args) -> str:
    """The text that is continued, on every rank."""
    if args.system and not args.template:
        raise ValueError("--system stands before a conversation; say how one is written with --template")
    if bool(args.prompt) == bool(args.prompt_file):
        raise ValueError("give one of --prompt and --prompt-file: what is continued")
    if args.prompt_file == "-":
        return together(None, lambda: sys.stdin.read() if dist.get_rank() == 0 else "")[0]
    return Path(args.prompt_file).read_text(encoding="utf-8") if args.prompt_file else args.prompt


def encoded(args: Args, folder: Folder, tokenizer: Tokenizer, text: str, config: DecoderConfig) -> list[int]:
    """Token ids, with what begins a text; or those of a conversation that is to be answered."""
    if args.template:
        messages = [{"role": "system", "content": args.system}] * bool(args.system)
        ask = question_encoder(tokenizer.name, args.template)
        ids = [int(token) for token in ask([*messages, {"role": "user", "content": text}])]
    else:
        ids = [*beginning(folder, tokenizer), *map(int, tokenizer.encode(text))]
    if not ids:
        raise ValueError("the prompt has no token; write something to continue")
    if max(ids) >= config.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)} and the model a vocabulary of {config.vocab_size}: another tokenizer "
            "made its data; name it as --tokenizer"
        )
    return ids


def beginning(folder: Folder, tokenizer: Tokenizer) -> list[int]:
    """What stood before each text in training: as a checkpoint of ours says, else what the tokenizer itself adds."""
    if (folder / "train_state.json").is_file():
        bos = json.loads((folder / "config.json").read_bytes()).get("bos_token_id")
        return [] if bos is None else [bos]
    if not Path(tokenizer.name).is_file():
        return []
    inner = tokenizers.Tokenizer.from_file(tokenizer.name)
    whole, plain = inner.encode("a").ids, inner.encode("a", add_special_tokens=False).ids
    return whole[: next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)]


def ends_of(folder: Folder, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json (of chat models, several)."""
    path = folder / "generation_config.json"
    told = json.loads(path.read_bytes()) if path.is_file() else {}
    ends = told.get("eos_token_id") if isinstance(told, dict) else None
    return {end for end in (tokenizer.eos, *(ends if isinstance(ends, list) else [ends])) if isinstance(end, int)}


def tokens_to_write(args: Args, prompt: Sequence[int], config: DecoderConfig) -> int:
    """How many; refuses what the model's context does not hold."""
    room = config.max_length - len(prompt)
    if args.tokens is None:
        return min(128, room) if room > 0 and args.cache else 128
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: write at least one")
    if args.cache and args.tokens > room:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and --tokens {args.tokens} exceed the model's {config.max_length}; the "
            f"most is --tokens {max(0, room)}, or --no-cache, which drops what is oldest"
        )
    return args.tokens


def plan_lines(folder: Folder, recipe: Recipe, length: int) -> Iterator[str]:
    """What would be read and held."""
    config, world, width = recipe.model, recipe.mesh.world, WIDTH[recipe.dtype]
    total = count_parameters(config).total
    cache = 2 * config.layers * config.kv_heads * config.head_dim * length * width
    yield f"read    {folder}: {total:,} parameters as {recipe.dtype}"
    yield f"memory  weights {size_text(total * width // world)} a rank, on {world}"
    yield f"        keys and values of {length:,} tokens {size_text(cache // world)} a rank"


if __name__ == "__main__":
    sys.exit(main())
