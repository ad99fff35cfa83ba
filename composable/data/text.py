"""From text to token ids: the default corpus and tokenizers."""

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from composable.data.documents import clean
from composable.data.tokens import PYTHON_STDLIB, Tokens


def python_stdlib() -> Tokens:
    """Every `*.py` file of this Python's standard library, byte by byte: about 30 MB that every machine has.

    Each file is a document, in the order of relative paths; installed packages are left out and empty files give no
    document. 256 tokens, no end-of-text token. The text differs between Python versions: `source` names the version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__")]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    texts = [text for name in sorted(names) if (text := (root / name).read_bytes())]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    source = f"{PYTHON_STDLIB} {platform.python_version()}"
    return Tokens(np.frombuffer(b"".join(texts), np.uint8), offsets, 256, tokenizer="byte", source=source)


def bigram_entropy(tokens: Tokens) -> float:
    """H(next token | token before) in nats, over all pairs of neighbours: the loss of the best bigram table.

    A model that uses more than one token of context must come out below it. Counts V^2 integers; raises ValueError
    above 4096 tokens of vocabulary, where most pairs occur once and the number says nothing, and where there is no
    pair.
    """
    size = tokens.vocab_size
    if size > 4096:
        raise ValueError(f"bigram entropy is for at most 4096 tokens of vocabulary (bytes, say); this data has {size}")
    if len(tokens) < 2:
        raise ValueError(f"bigram entropy needs at least 2 tokens; got {len(tokens)}")
    counts = np.zeros(size * size, np.int64)
    step = max(1 << 22, size * size)
    for start in range(0, len(tokens) - 1, step):
        part = tokens.tokens[start : start + step + 1].astype(np.int64)
        counts += np.bincount(part[:-1] * size + part[1:], minlength=size * size)
    joint = counts.reshape(size, size)
    before = joint.sum(1, keepdims=True)
    seen = joint > 0
    conditional = joint[seen] / np.broadcast_to(before, joint.shape)[seen]
    return float(-(joint[seen] / (len(tokens) - 1) * np.log(conditional)).sum())


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. `bos` and `eos` are ids or None; `encode` adds neither of them, whatever the text says.

    `encode` takes a str or UTF-8 bytes and gives a vector of ids; `decode` takes ids and gives a str.
    """

    name: str
    vocab_size: int
    bos: int | None
    eos: int | None
    encode: Callable[[str | bytes], np.ndarray]
    decode: Callable[[Sequence[int]], str]


def byte_tokenizer() -> Tokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of text. Every file can be encoded, exactly."""

    def encode(text: str | bytes) -> np.ndarray:
        return np.frombuffer(text if isinstance(text, bytes) else clean(text)[0].encode(), np.uint8)

    def decode(ids: Sequence[int]) -> str:
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")

    return Tokenizer("byte", 257, None, 256, encode, decode)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer that `name_or_path` names: "byte", a `tokenizer.json`, or a folder that holds one.

    Which tokens begin and end a text is read from `tokenizer_config.json` or `special_tokens_map.json` beside it, else
    recognised by usual names (`<s>`, `<|endoftext|>`...). Raises FileNotFoundError or ValueError.
    """
    if name_or_path == "byte":
        return byte_tokenizer()
    path = Path(name_or_path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f'tokenizer {name_or_path!r} is neither "byte" nor a tokenizer.json nor a folder that holds one'
        )
    return _file_tokenizer(path)


_USUAL_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|begin▁of▁sentence|>", "[BOS]")
_USUAL_EOS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|end▁of▁sentence|>", "[EOS]")


def _special_token(folder: Path, role: str) -> str | None:
    """What the files beside a tokenizer.json call its bos_token or eos_token."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            token = json.loads((folder / name).read_text(encoding="utf-8")).get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def _file_tokenizer(path: Path) -> Tokenizer:
    import tokenizers  # as long to import as all the rest, and runs that train do not need it

    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    inner.no_truncation()  # a file may ask for either, and long documents would lose their ends without a word
    inner.no_padding()
    inner.encode_special_tokens = True  # "<s>" in a text is three characters, not the beginning of another document

    added = {token.content for token in inner.get_added_tokens_decoder().values()}

    def find(role: str, usual: Iterable[str]) -> tuple[str, int] | None:
        named = _special_token(path.parent, role)
        text = named if named is not None else next((name for name in usual if name in added), None)
        token = inner.token_to_id(text) if text is not None else None
        if text is None or token is None:
            return None
        return text, token

    bos, eos = find("bos_token", _USUAL_BOS), find("eos_token", _USUAL_EOS)
    specials = [special for special in (bos, eos) if special is not None]
    reserved = np.array(sorted({token for _, token in specials}), np.int64)

    def ids(text: str) -> np.ndarray:
        return np.array(inner.encode(text, add_special_tokens=False).ids, np.int64)

    def encode(text: str | bytes) -> np.ndarray:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else clean(text)[0]
        found = ids(text)
        if not np.isin(found, reserved).any():
            return found
        # The vocabulary itself spells the token out: encode it in two pieces, so that the spelling does not occur.
        for special, _ in specials:
            text = text.replace(special, special[:1] + "\0" + special[1:])
        found = np.concatenate([ids(piece) for piece in text.split("\0")])
        if np.isin(found, reserved).any():
            raise ValueError(f"tokenizer {path} encodes ordinary text as its token {specials}, which marks borders")
        return found

    def decode(tokens: Sequence[int]) -> str:
        return inner.decode([int(token) for token in tokens], skip_special_tokens=True)

    # Ids may have gaps: the number of tokens is not enough.
    size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
    return Tokenizer(str(path.resolve()), size, bos and bos[1], eos and eos[1], encode, decode)
