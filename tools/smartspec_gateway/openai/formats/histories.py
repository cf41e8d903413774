"""Forms of messages that more chat templates take. A rule is used only if a template refuses the
messages without it, so that templates which take more are given what the client sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, count
from typing import Any

History = Sequence[Mapping[str, Any]]

SYSTEM = ("system", "developer")
ID_LEN = 9
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def forms(messages: History) -> Iterator[History]:
    """The messages as they are, and then by as few rules as possible."""
    tried: list[History] = []
    for num_rules in range(len(RULES) + 1):
        for rules in combinations(RULES, num_rules):
            form = messages
            for rule in rules:
                form = rule(form)
            if form not in tried:
                tried.append(form)
                yield form


def with_short_ids(messages: History) -> History:
    """Ids of calls have nine letters and digits, as Mistral's templates want them. Calls and
    results without ids belong together in their order."""
    calls, results = count(), count()
    found = []
    for message in messages:
        changed = {**message}
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": _short(call.get("id"), next(calls))}
                for call in message["tool_calls"]
            ]
        if message["role"] == "tool":
            changed["tool_call_id"] = _short(message.get("tool_call_id"), next(results))
        found.append(changed)
    return found


def with_one_call_each(messages: History) -> History:
    """Llama 3's templates take one call in a message. Each result follows its call."""
    found: list[Mapping[str, Any]] = []
    results: list[Mapping[str, Any]] = []  # of the calls of the last message
    calls: list[Mapping[str, Any]] = []

    def flush() -> None:
        for call in calls:
            found.append(call)
            wanted = call["tool_calls"][0].get("id")
            same = (one for one in results if one.get("tool_call_id") == wanted)
            if (result := next(same, None)) is not None:
                results.remove(result)
                found.append(result)
        found.extend(results)
        calls.clear()
        results.clear()

    for message in messages:
        if calls and message["role"] == "tool":
            results.append(message)
            continue
        flush()
        if len(message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        for number, call in enumerate(message["tool_calls"]):
            first = message if number == 0 else {**_without_thought(message), "content": ""}
            calls.append({**first, "tool_calls": [call]})
    flush()
    return found


def with_one_system_message(messages: History) -> History:
    """All system messages become the first message, and users' messages that follow each other
    one message, because the same templates want roles to alternate."""
    system = [message for message in messages if message["role"] in SYSTEM]
    found = [{**system[0], "content": _joined(system)}] if system else []
    for message in messages:
        if message["role"] in SYSTEM:
            continue
        if message["role"] == "user" and found and found[-1]["role"] == "user":
            found[-1]["content"] = _joined([found[-1], message])
        else:
            found.append({**message})
    return found


def with_text_in_results(messages: History) -> History:
    """What the user writes after the results of calls ends the last of them. Mistral's templates
    count no calls and no results, so that two messages of the user follow each other."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1]["content"] = _joined([found[-1], message])
        else:
            found.append({**message})
    return found


def without_system_message(messages: History) -> History:
    """Its text begins the first message of the user, as for Gemma 2."""
    system, *others = messages
    if system["role"] not in SYSTEM or not others:
        return messages
    first, *others = others
    if first["role"] != "user":
        return [{**system, "role": "user"}, first, *others]
    return [{**first, "content": _joined([system, first])}, *others]


def with_user(messages: History) -> History:
    """The last message is the user's, for templates that leave out a system message without one."""
    return [*messages[:-1], {**messages[-1], "role": "user"}]


def without_thoughts(messages: History) -> History:
    """Some templates refuse a thought beside text and calls."""
    return list(map(_without_thought, messages))


def with_thinking(messages: History) -> History:
    """Thoughts have the name that gpt-oss's template reads."""
    found = []
    for message in messages:
        thoughts = [text for name in THOUGHTS if isinstance(text := message.get(name), str)]
        text = next(filter(None, thoughts), "")
        found.append(_without_thought(message) | ({"thinking": text} if text else {}))
    return found


RULES = (
    with_short_ids,
    with_one_call_each,
    with_one_system_message,
    with_text_in_results,
    without_system_message,
    without_thoughts,
)


def _without_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in THOUGHTS}


def _short(given: Any, number: int) -> str:
    """The same for the same id. An id that is short already is kept."""
    text = str(number if given is None else given)
    if len(text) == ID_LEN and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:ID_LEN]


def _joined(messages: History) -> str:
    return "\n\n".join(filter(None, (message["content"] for message in messages)))
