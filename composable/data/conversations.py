"""Conversations in JSON records: the forms that data sets have, as one list of messages."""

import json
from typing import Any

from composable.data.documents import clean

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT = {  # its names of roles
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FORMS = "messages, conversations, prompt and completion, or instruction and output"

Message = dict[str, str]
"""`role`, one of ROLES, and `content`"""


def conversation_of(line: str) -> list[Message]:
    """The messages of a JSON record, in any of these forms:

    * {"messages": [{"role": "system|user|assistant|tool", "content": "..."}, ...]};
    * {"conversations": [{"from": "human|gpt|...", "value": "..."}, ...]}, ShareGPT's, with or without "system";
    * {"prompt": "...", "completion": "..."}, each a text or a list of messages;
    * {"instruction": "...", "input": "...", "output": "..."}, Alpaca's, with or without "input" and "system".

    Raises:
        ValueError: what is wrong with it: not JSON, none of the forms, an unknown role, an empty message, no answer;
            calls of tools, which are not read.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where an object with a conversation should be")
    if record.get("tools"):
        raise ValueError("field 'tools' is not read; write what tools there are into the system message")
    raw = _raw_messages(record)
    messages = [_message(number, item) for number, item in enumerate(raw, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"no message of the assistant among {len(messages)}: there is nothing to learn")
    return messages


def _raw_messages(record: dict[str, Any]) -> list[Any]:
    """Items with role and content, not yet checked."""
    if "messages" in record:
        return _list(record, "messages")
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if "conversations" in record:
        return system + [_sharegpt(item) for item in _list(record, "conversations")]
    if "prompt" in record and "completion" in record:
        sides = (("prompt", "user"), ("completion", "assistant"))
        return system + [item for name, role in sides for item in _side(record, name, role)]
    if "instruction" in record and "output" in record:
        texts = [record["instruction"], *([record["input"]] if record.get("input") else [])]
        question = "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else None
        answer = {"role": "assistant", "content": record["output"]}
        return [*system, {"role": "user", "content": question}, answer]
    fields = ", ".join(map(repr, list(record)[:8])) or "none"
    raise ValueError(f"no conversation: the record has the fields {fields}, and {FORMS} are looked for")


def _list(record: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(record[name], list):
        raise ValueError(f"field {name!r} is {type(record[name]).__name__}, not a list of messages")
    return record[name]


def _side(record: dict[str, Any], name: str, role: str) -> list[Any]:
    return record[name] if isinstance(record[name], list) else [{"role": role, "content": record[name]}]


def _sharegpt(item: Any) -> Any:
    if not isinstance(item, dict) or "from" not in item:
        return item
    name = item["from"]
    return {"role": SHAREGPT.get(name, name) if isinstance(name, str) else name, "content": item.get("value")}


def _message(number: int, item: Any) -> Message:
    """A checked message."""
    if not isinstance(item, dict):
        raise ValueError(f"message {number} is {type(item).__name__}, not an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has role {role!r}; roles are {', '.join(ROLES)}")
    if item.get("tool_calls"):
        raise ValueError(f"message {number} ({role}) has tool_calls, which are not read; write the call as its content")
    if not isinstance(content, str):
        what = "null or missing" if content is None else type(content).__name__
        raise ValueError(f"message {number} ({role}) has a content that is {what}, not a string")
    if not content.strip():
        raise ValueError(f"message {number} ({role}) is empty")
    return {"role": role, "content": clean(content)[0]}
