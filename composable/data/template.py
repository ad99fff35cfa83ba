"""Chat templates: how a conversation is written as one text. Those of tokenizers, and some by name."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from composable.data.conversations import Message

Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether the beginning of an answer follows) -> text"""

BUILT_IN = {
    # https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md, as Qwen and others write it.
    "chatml": (
        "{{ bos_token }}{% for message in messages %}"
        "<|im_start|>{{ message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783) and its model card: what tools say has the role ipython.
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "<|start_header_id|>{{ 'ipython' if message['role'] == 'tool' else message['role'] }}<|end_header_id|>"
        "{{ '\n\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # For any tokenizer with an end-of-text token. An answer begins with a space, as words after a colon do.
    "plain": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] | trim }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
NEEDED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""tokens without which a template by name makes no sense"""


def template_text(name: str, folder: Path | None) -> str:
    """The Jinja source of a template: a name of BUILT_IN, a file, or "tokenizer" for that of the tokenizer in `folder`.

    Raises:
        ValueError: there is no such template, or the tokenizer has none.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    names = ", ".join(BUILT_IN)
    if name != "tokenizer":
        if not Path(name).is_file():
            raise ValueError(f"template {name!r} is neither tokenizer, nor one of {names}, nor a file")
        return Path(name).read_text(encoding="utf-8")
    if folder is not None and (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = _read(folder, "tokenizer_config.json").get("chat_template") or _read(folder, "chat_template.json").get(
        "chat_template"
    )
    if isinstance(found, list):  # several by name
        found = {item["name"]: item["template"] for item in found}.get("default")
    if not isinstance(found, str):
        raise ValueError(
            f"the tokenizer {f'in {folder} ' if folder else ''}has no chat template (chat_template.jinja, or in "
            f"tokenizer_config.json); choose one of {names}, or give a file"
        )
    return found


def special_tokens(folder: Path | None) -> dict[str, str]:
    """What templates know by name: bos_token, eos_token and others, as the tokenizer's files call them."""
    config = {**_read(folder, "special_tokens_map.json"), **_read(folder, "tokenizer_config.json")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}


def compile_template(source: str, tokens: Mapping[str, str], today: date) -> Render:
    """A function that writes conversations by a Jinja template, with what `transformers` gives to templates.

    Templates come with models of others: they run in a sandbox.

    Args:
        tokens: what the template knows as bos_token, eos_token...
        today: the date that it writes if it asks for one; a run of the tool should not depend on midnight.

    Raises:
        ValueError: here, for what is no template; in the function, where the template refuses a conversation.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=today.strftime)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is not one that Jinja reads: {error}") from error
    known = {"bos_token": "", "eos_token": "", **tokens, "tools": None, "documents": None}

    def render(messages: Sequence[Message], answer_follows: bool) -> str:
        try:
            return template.render(messages=list(messages), add_generation_prompt=answer_follows, **known)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    return render


class _Generation(Extension):
    """{% generation %}...{% endgeneration %}, which some templates put around answers: what is inside, as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes HTML


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None or not (folder / name).is_file():
        return {}
    return json.loads((folder / name).read_text(encoding="utf-8"))
