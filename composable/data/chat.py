"""Conversations as token ids, and which of them have a loss: the answers, to the token that ends them.

A conversation is written by its template and encoded once, as a whole: ids are those that a model is given when it is
used. Where answers lie is found in the text, and carried to tokens by the characters they stand for.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np

from composable.data.conversations import Message
from composable.data.template import NEEDED, Render, compile_template, special_tokens, template_text
from composable.data.text import load_tokenizer

Mask = Literal["answers", "last-answer", "none"]
_END = "\uffff"  # no character: how the end of text, a token without a spelling, is written for the byte tokenizer
_SENTINEL = "\ue000answer\ue001"


@dataclass(frozen=True)
class Conversation:
    """A conversation of n tokens."""

    ids: np.ndarray
    """[n] int64"""
    counted: np.ndarray | None
    """[n] bool: which have a loss; None: all"""
    text: str
    starts: np.ndarray
    """[n] int64: the character of `text` at which each token begins"""
    torn: int = 0
    """answers before which a model is given other tokens: the text up to there, encoded alone, ends otherwise. A token
    that begins before its answer has no loss"""
    endless: int = 0
    """answers after which the template writes no token that ends them"""


@dataclass(frozen=True)
class _Encoder:
    """What is needed of a tokenizer: its control tokens are recognised in a text."""

    encode: Callable[[str], tuple[np.ndarray, np.ndarray]]
    """text -> ids, and the character at which each begins"""
    control: tuple[str, ...]
    """spellings that no message may hold"""
    ends: re.Pattern[str]
    """what may end an answer"""
    spell: Callable[[int], str | None]
    """id -> how a text holds this token"""


def chat_encoder(
    tokenizer: str, template: str, mask: Mask = "answers", today: date | None = None
) -> Callable[[Sequence[Message]], Conversation]:
    """A function from messages to a `Conversation`.

    Args:
        tokenizer: as `load_tokenizer` takes it.
        template: "tokenizer" for its own, chatml, llama3, plain, or a file.
        mask: what has a loss: every answer, the last one, or all tokens.
        today: for templates that write the date; by default today's.

    Raises:
        ValueError, FileNotFoundError: no such tokenizer or template, or they do not go together. The function raises
            ValueError for a conversation that the template refuses, that spells control tokens, or whose answers
            cannot be told from the rest.
    """
    encoder, render = _writer(tokenizer, template, today)

    def encode(messages: Sequence[Message]) -> Conversation:
        _check_spelling(encoder, messages)
        text = render(messages, False)
        ids, starts = encoder.encode(text)
        if mask == "none":
            return Conversation(ids, None, text, starts)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        counted, torn, endless = np.zeros(len(ids), bool), 0, 0
        for place in answers if mask == "answers" else answers[-1:]:
            start, end = _find_answer(render, messages, place, text)
            closing = encoder.ends.match(text, end)
            counted |= (starts >= start) & (starts < (closing.end() if closing else end))
            torn += _is_torn(encoder, text, ids, starts, start)
            endless += closing is None
        if not counted.any():
            raise ValueError("no token lies wholly in an answer")
        return Conversation(ids, counted, text, starts, torn, endless)

    return encode


def question_encoder(
    tokenizer: str, template: str, today: date | None = None
) -> Callable[[Sequence[Message]], np.ndarray]:
    """A function from messages to the ids [n] that a model is given to answer them; as `chat_encoder` otherwise."""
    encoder, render = _writer(tokenizer, template, today)

    def encode(messages: Sequence[Message]) -> np.ndarray:
        _check_spelling(encoder, messages)
        return encoder.encode(render(messages, True))[0]

    return encode


def _writer(tokenizer: str, template: str, today: date | None) -> tuple[_Encoder, Render]:
    coder = load_tokenizer(tokenizer)
    path = Path(coder.name) if coder.name != "byte" else None
    folder = path.parent if path else None
    source = template_text(template, folder)
    encoder = _byte_encoder() if path is None else _file_encoder(path)
    borders = {"bos_token": coder.bos, "eos_token": coder.eos}
    spelled = {name: encoder.spell(token) or "" for name, token in borders.items() if token is not None}
    known = {**spelled, **special_tokens(folder)}
    if absent := [token for token in NEEDED.get(template, ()) if token not in encoder.control]:
        raise ValueError(
            f"template {template} writes {', '.join(absent)}, no special token of the tokenizer {coder.name}; choose "
            "the tokenizer's own template (--template tokenizer), or plain"
        )
    if template == "plain" and "eos_token" not in known:
        raise ValueError(f"template plain ends answers with the end-of-text token, and {coder.name} has none")
    return encoder, compile_template(source, known, today or date.today())


def _check_spelling(encoder: _Encoder, messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages, start=1):
        if found := next((token for token in (*encoder.control, _SENTINEL) if token in message["content"]), None):
            raise ValueError(f"message {number} spells {found!r}, a control token of the tokenizer")


def _find_answer(render: Render, messages: Sequence[Message], place: int, text: str) -> tuple[int, int]:
    """Where in `text` the answer messages[place] begins and ends, without what closes it.

    It begins where the text ends that a model is given to answer, so what the template writes between that and the
    content is a part of it. Its end is found by another answer in its place.
    """
    given = render(messages[:place], True)
    if not text.startswith(given):
        raise ValueError(
            f"the template writes what is before message {place + 1} otherwise once it is answered (as templates that "
            "drop earlier reasoning do), so a model would be asked otherwise; --mask last-answer may do, or another "
            "template"
        )
    other = [*messages[:place], {**messages[place], "content": _SENTINEL}, *messages[place + 1 :]]
    _, found, after = render(other, False).partition(_SENTINEL)
    end = len(text) - len(after)
    if not found or _SENTINEL in after or not text.endswith(after) or end <= len(given):
        raise ValueError(f"the template does not show message {place + 1} once, as one piece of text")
    return len(given), end


def _is_torn(encoder: _Encoder, text: str, ids: np.ndarray, starts: np.ndarray, start: int) -> bool:
    """Whether text[:start], encoded alone, gives other ids than the whole text has there.

    A control token divides what is encoded, so only what follows the last one is looked at.
    """
    last = max((text.rfind(token, 0, start) for token in encoder.control), default=0)
    first = max(int(np.searchsorted(starts, max(last, 0), side="right")) - 1, 0)
    alone, _ = encoder.encode(text[int(starts[first]) : start])
    return not np.array_equal(alone, ids[first : np.searchsorted(starts, start)])


def _file_encoder(path: Path) -> _Encoder:
    import tokenizers  # as long to import as all the rest

    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.no_truncation()
    inner.no_padding()
    added = inner.get_added_tokens_decoder().values()
    closing = sorted({token.content for token in added if token.content.strip()}, key=len, reverse=True)

    def encode(text: str) -> tuple[np.ndarray, np.ndarray]:
        found = inner.encode(text, add_special_tokens=False)
        spans = np.array(found.offsets, np.int64).reshape(-1, 2)
        # Byte-level tokenizers may leave the space before a word out of its span: it begins where the last one ended.
        ended = np.maximum.accumulate(np.concatenate([[0], spans[:, 1]]))[:-1]
        return np.array(found.ids, np.int64), np.minimum(spans[:, 0], ended)

    control = tuple(token.content for token in added if token.special)
    ends = re.compile(" ?(?:" + "|".join(map(re.escape, closing)) + ")" if closing else "$^")
    return _Encoder(encode, control, ends, inner.id_to_token)


def _byte_encoder() -> _Encoder:
    def encode(text: str) -> tuple[np.ndarray, np.ndarray]:
        raw = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        characters = np.cumsum(raw & 0xC0 != 0x80) - 1
        end = np.flatnonzero(raw[:-2] == 0xEF) if len(raw) > 2 else np.zeros(0, np.int64)
        end = end[(raw[end + 1] == 0xBF) & (raw[end + 2] == 0xBF)]  # U+FFFF in UTF-8
        raw[end] = 256
        kept = np.ones(len(raw), bool)
        kept[end + 1] = kept[end + 2] = False
        return raw[kept], characters[kept]

    return _Encoder(encode, (_END,), re.compile(_END), {256: _END}.get)


def marked(conversation: Conversation, colour: bool) -> str:
    """The text with what counts marked: by colour on a terminal that has some, else between [[ and ]]."""
    before, after = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    counted = np.ones(len(conversation.ids), bool) if conversation.counted is None else conversation.counted
    toggles = np.flatnonzero(np.diff(np.concatenate([[False], counted]).astype(np.int8)))
    borders = [0, *conversation.starts[toggles].tolist(), len(conversation.text)]
    pieces = [conversation.text[first:last] for first, last in itertools.pairwise(borders)]
    shown = [f"{before}{piece}{after}" if number % 2 else piece for number, piece in enumerate(pieces)]
    return "".join(shown).replace(_END, "<end>")
