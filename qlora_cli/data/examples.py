"""A row → an example: a list of messages that a chat template can take, whatever shape the row had.

Each shape is one function of `_SHAPES`; `detect_format` chooses among them for a source and keeps its
reason. Every rule about what a message may be is here, so the modules behind this one meet only messages
with a known role and a text. This module knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_cli.data.sources import Origin, Row
from qlora_cli.errors import Fault

ROLES = ("system", "developer", "user", "assistant", "tool")
FROM_ROLES = {  # `from` of from/value conversations, as other tools write them
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
_CHAT_KEYS = ("messages", "conversations")
_INSTRUCTION_KEYS = ("instruction", "output")
_CHOICES = "chat (a list `messages` of role and content), instruction (`instruction` and `output`)"


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation with what is to be learned from it.

    Attributes:
        messages: For the chat template; each has `role` and a text `content`, other keys as in the row.
        trained: For each message, False where the row says `train: false` or `weight: 0`.
        tools: Tool descriptions for the template, None where the row has none.
        origin: File and row.
        source: Name of the source.
    """

    messages: list[dict[str, Any]]
    trained: tuple[bool, ...]
    tools: list[dict[str, Any]] | None
    origin: Origin
    source: str

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def answer(self) -> str:
        """The text of the last assistant message, which a generated answer is compared with."""
        return str(self.messages[self.answers[-1]]["content"])


@dataclass(frozen=True, slots=True)
class Detected:
    """The format of a source and why: `format` is `chat` or `instruction`."""

    format: str
    reason: str


def detect_format(row: Row, format: str, faults: list[Fault]) -> Detected | None:
    """Settle the format of a source by one of its rows.

    Args:
        row: The first row that could be read.
        format: What the recipe says: `auto`, `chat` or `instruction`.
        faults: Receives a fault where `auto` finds both formats or none.

    Returns:
        The format with its reason, or None where the row leaves it open.
    """
    if format != "auto":
        return Detected(format, "set in the recipe")
    chat = next((key for key in _CHAT_KEYS if key in row.fields), None)
    instruction = all(key in row.fields for key in _INSTRUCTION_KEYS)
    if chat and not instruction:
        return Detected("chat", f"row {row.origin.row} has `{chat}`")
    if instruction and not chat:
        return Detected("instruction", f"row {row.origin.row} has `instruction` and `output`")
    if chat:
        message = f"has both `{chat}` and `instruction` with `output`, so the format is not clear"
        hint = "set `format: chat` or `format: instruction` for this source"
        faults.append(row.origin.fault("ambiguous-format", message, accepted=_CHOICES, hint=hint))
    else:
        message = f"no format fits the keys {_listed(row.fields)}"
        faults.append(row.origin.fault("unknown-format", message, accepted=_CHOICES))
    return None


def to_example(row: Row, format: str, faults: list[Fault], source: str = "") -> Example | None:
    """Make an example of a row, or record everything that is wrong with it.

    Args:
        row: The row.
        format: `chat` or `instruction`.
        faults: Receives every fault of this row.
        source: Name of the source.

    Returns:
        The example, or None where the row has a fault.
    """
    found: list[Fault] = []
    messages, trained = _SHAPES[format](row, found)
    tools = _tools(row, found)
    if not found and messages:
        found += _nothing_to_learn(row.origin, messages, trained)
    faults += found
    if found or not messages:
        return None
    return Example(messages, tuple(trained), tools, row.origin, source)


_Shaped = tuple[list[dict[str, Any]], list[bool]]


def _chat(row: Row, faults: list[Fault]) -> _Shaped:
    """The messages of a row with `messages`, or with `conversations` of `from` and `value`."""
    key = next((key for key in _CHAT_KEYS if key in row.fields), None)
    if key is None:
        others = f", only {_listed(row.fields)}" if row.fields else ": it is an empty object"
        text = f"has no `messages`{others}"
        faults.append(row.origin.fault("no-messages", text, accepted="a list of messages"))
        return [], []
    given = row.fields[key]
    if not isinstance(given, list) or not given:
        what = "is an empty list" if given == [] else f"is {_shown(given)}, not a list"
        faults.append(row.origin.fault("no-messages", f"`{key}` {what}", accepted="a list of messages"))
        return [], []
    messages: list[dict[str, Any]] = []
    trained: list[bool] = []
    for index, entry in enumerate(given):
        place = f"{key}[{index}]"
        if not isinstance(entry, dict):
            problem = f"`{place}` is {_shown(entry)}, not an object with `role` and `content`"
            faults.append(row.origin.fault("not-a-message", problem))
            continue
        message = _from_value(entry) if "from" in entry and "role" not in entry else dict(entry)
        is_trained = _is_trained(message, place, row.origin, faults)
        _check_role(message, entry, place, row.origin, faults)
        _check_content(message, "value" if "value" in entry else "content", place, row.origin, faults)
        if is_trained and _is_empty_answer(message):
            faults.append(row.origin.fault("empty-answer", f"the answer `{place}` is empty"))
        messages.append(message)
        trained.append(is_trained)
    return messages, trained


def _instruction(row: Row, faults: list[Fault]) -> _Shaped:
    """A user message of `instruction` and `input`, and the answer `output`; `system` may come before."""
    texts: dict[str, str] = {}
    for key, is_needed in (("instruction", True), ("input", False), ("output", True), ("system", False)):
        value = row.fields.get(key)
        if isinstance(value, str):
            texts[key] = value
        elif value is None and not is_needed:
            texts[key] = ""
        elif value is None:
            what = "is null" if key in row.fields else "is missing"
            code = "null-answer" if key == "output" else "missing-field"
            faults.append(row.origin.fault(code, f"`{key}` {what}", accepted="a text"))
        else:
            faults.append(row.origin.fault("not-text", f"`{key}` is {_shown(value)}", accepted="a text"))
    if len(texts) < 4:
        return [], []
    question = "\n\n".join(part for part in (texts["instruction"], texts["input"]) if part.strip())
    if not question:
        faults.append(row.origin.fault("missing-field", "`instruction` and `input` are both empty"))
    if not texts["output"].strip():
        faults.append(row.origin.fault("empty-answer", "`output` is empty"))
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    )
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]
    return messages, [True] * len(messages)


_SHAPES: Mapping[str, Callable[[Row, list[Fault]], _Shaped]] = {"chat": _chat, "instruction": _instruction}


def _from_value(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A from/value entry under the names of chat templates; an unknown `from` stays as it is."""
    message = {key: value for key, value in entry.items() if key not in ("from", "value")}
    speaker = entry["from"]
    message["role"] = FROM_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if "value" in entry:
        message["content"] = entry["value"]
    return message


def _check_role(
    message: Mapping[str, Any], entry: Mapping[str, Any], place: str, origin: Origin, faults: list[Fault]
) -> None:
    """Record a role that no template knows: leaving the message out would teach another conversation."""
    accepted = ", ".join(FROM_ROLES if "from" in entry and "role" not in entry else ROLES)
    if "role" not in message:
        faults.append(origin.fault("unknown-role", f"`{place}` has no `role`", accepted=accepted))
    elif message["role"] not in ROLES:
        shown = message["role"] if isinstance(message["role"], str) else _shown(message["role"])
        faults.append(origin.fault("unknown-role", f"`{place}` has the role `{shown}`", accepted=accepted))


def _check_content(
    message: dict[str, Any], key: str, place: str, origin: Origin, faults: list[Fault]
) -> None:
    """Make `content` one text, or record why it is none."""
    content = message.get("content")
    is_answer = message.get("role") == "assistant"
    if isinstance(content, str):
        return
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        message["content"] = "".join(part["text"] for part in content)
    elif content is None and is_answer and message.get("tool_calls"):
        message["content"] = ""  # some templates add to the text, and null is no text
    elif content is None:
        what = "is null" if "content" in message else "is missing"
        code = "null-answer" if is_answer else "missing-field"
        faults.append(origin.fault(code, f"`{key}` of `{place}` {what}", accepted="a text"))
    else:
        accepted = 'a text, or a list of {"type": "text", "text": ...}'
        faults.append(
            origin.fault("not-text", f"`{key}` of `{place}` is {_shown(content)}", accepted=accepted)
        )


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message of the assistant says nothing and calls no tool."""
    content = message.get("content")
    is_silent = isinstance(content, str) and not content.strip() and not message.get("tool_calls")
    return message.get("role") == "assistant" and is_silent


def _is_text_part(part: Any) -> bool:
    """Whether a part of a list of contents is text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_trained(message: dict[str, Any], place: str, origin: Origin, faults: list[Fault]) -> bool:
    """Take `train` and `weight` out of a message: False where one of them says there is no loss on it."""
    train, weight = message.pop("train", None), message.pop("weight", None)
    if train is not None and not isinstance(train, bool):
        text = f"`train` of `{place}` is {_shown(train)}"
        faults.append(origin.fault("bad-weight", text, accepted="true, false"))
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        text = f"`weight` of `{place}` is {_shown(weight)}"
        faults.append(origin.fault("bad-weight", text, accepted="0, 1"))
    elif train is not None and weight is not None and train != bool(weight):
        text = f"`train` and `weight` of `{place}` contradict each other"
        faults.append(origin.fault("bad-weight", text, accepted="one of the two"))
    return train is not False and weight != 0


def _tools(row: Row, faults: list[Fault]) -> list[dict[str, Any]] | None:
    """The row's tool descriptions; none and an empty list are the same to a template."""
    tools = row.fields.get("tools")
    if not tools:
        return None
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools
    shown = _shown(tools)
    faults.append(row.origin.fault("bad-tools", f"`tools` is {shown}", accepted="a list of objects"))
    return None


def _nothing_to_learn(origin: Origin, messages: list[dict[str, Any]], trained: list[bool]) -> list[Fault]:
    """Faults of a row whose answers teach nothing."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        text = "holds no `assistant` message, so this row teaches nothing"
        return [origin.fault("nothing-supervised", text)]
    if not any(trained[index] for index in answers):
        text = "every `assistant` message has `train: false` or weight 0, so this row teaches nothing"
        return [origin.fault("nothing-supervised", text)]
    return []


def _shown(value: Any) -> str:
    """A value for a message: its kind, and what it is where that is short."""
    kinds = {bool: "boolean", dict: "an object", list: "a list", type(None): "null"}
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (int, float)):
        return f"`{value}`"
    if isinstance(value, str):
        return f"`{value if len(value) <= 40 else value[:37] + '...'}`"
    return kinds.get(type(value), type(value).__name__)


def _listed(fields: Mapping[str, Any]) -> str:
    """The keys of a row, the first eight of them."""
    keys = [f"`{key}`" for key in fields]
    if not keys:
        return "none"
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
