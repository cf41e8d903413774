"""Finds tool calls in generated text, as it arrives, in the formats that models write.

- Hermes and Qwen: `<tool_call>{"name": .., "arguments": {..}}</tool_call>` anywhere in the text
- Qwen3-Coder: `<function=NAME><parameter=KEY>value</parameter></function>`, with or without
  `<tool_call>` around it, and Seed-OSS in `<seed:tool_call>..</seed:tool_call>`; Llama 3.1 also
  with a JSON object in place of the parameters
- Qwen2.5-Coder: the JSON object in a fence, ```` ```json ````
- Llama 3: the text is `{"name": .., "parameters": {..}}`, maybe after `<|python_tag|>`, and maybe
  more of them, with `;` between
- Phi-4-mini: the text is a list of such objects, maybe after `functools`
- Mistral and Granite 3: such a list, maybe after `[TOOL_CALLS]` or `<|tool_call|>` anywhere
- Mistral since 2025: `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{..}` anywhere, maybe without the id
- Apertus: `<|tools_prefix|>[{NAME: {..}}]<|tools_suffix|>` anywhere
- Cohere: `<|START_ACTION|>[{"tool_name": .., "parameters": {..}}]<|END_ACTION|>` anywhere
- DeepSeek: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, `{..}` in a fence of JSON, and
  `<｜tool▁call▁end｜>` anywhere, maybe between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`
- LFM2: `<|tool_call_start|>[NAME(key="text", n=3)]<|tool_call_end|>` anywhere, or a list of JSON
  objects between these marks
- DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`, maybe between the
  same marks
- Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`
  anywhere, maybe between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`
- Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>` anywhere in the text
- gpt-oss: `<|channel|>commentary to=functions.NAME<|message|>{..}<|call|>`, of all forms that
  `harmony` reads
- GLM since 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`
- MiniMax: `<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`, between
  `<minimax:tool_call>` and `</minimax:tool_call>`
- GLM-4: the text is `NAME{..}`, maybe with a line break between

A call is passed on when it is complete. Text that is not a call of a given tool is content, so
nothing is lost. A call ends where its JSON ends: a text in its arguments may contain the marks.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

from smartspec_gateway.openai.formats import gemma, python_calls, tagged_calls
from smartspec_gateway.openai.formats.calls import (
    ObjectEnd,
    Tools,
    json_calls,
    named_calls,
    new_call,
    typed_call,
    xml_call,
)

BEGIN, END = "<tool_call>", "</tool_call>"
MISTRAL = "[TOOL_CALLS]"
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
APERTUS, APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
COHERE, COHERE_END = "<|START_ACTION|>", "<|END_ACTION|>"
DEEPSEEK, DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
DEEPSEEK_NAME = f"function{DEEPSEEK_SEP}"
DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
FUNCTIONS = "functions."
"""Before the name of a function, as gpt-oss and Kimi write it."""

HARMONY, HARMONY_END = f"<|channel|>commentary to={FUNCTIONS}", "<|call|>"
HARMONY_TYPE, HARMONY_ARGS = "<|constrain|>json", "<|message|>"
KIMI, KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
KIMI_ARGS = "<|tool_call_argument_begin|>"
KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
SEED, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
FENCE = "```"

CLOSINGS: dict[str, tuple[str, ...]] = {
    python_calls.BEGIN: (python_calls.END,),
    BEGIN: (END,),
    MISTRAL: (),
    "<|tool_call|>": (),
    SEED: (SEED_END,),
    tagged_calls.MINIMAX: (tagged_calls.MINIMAX_END,),
    tagged_calls.INVOKE: (tagged_calls.MINIMAX_END,),
    APERTUS: (APERTUS_END,),
    COHERE: (COHERE_END,),
    HARMONY: (HARMONY_END,),
    KIMI: KIMI_ENDS,
    KIMI_CALL: KIMI_ENDS,
    DEEPSEEK: (FENCE, *DEEPSEEK_ENDS),
    DEEPSEEK_CALL: (FENCE, *DEEPSEEK_ENDS),
}
"""What may follow calls that begin with these marks, in its order."""

ANYWHERE = (*CLOSINGS, FUNCTION, gemma.BEGIN)
"""What begins a call anywhere in a text."""

MARKS = ("<|python_tag|>", "functools")
"""What may be before calls at the beginning of a text."""

MOST_HEAD = 256
"""Characters between a mark and the arguments of a call."""

SPACE = " \t\r\n"

HEADER = re.compile(r'\{"name": "([^"]+)", "(?:arguments|parameters)": ')
"""What a call of `call_grammar` in JSON begins with."""

FENCED = re.compile(r"```(?:json)?\s*(?=[\[{])")
BEGINS_FENCE = re.compile(r"`{1,3}$|```(?:j|js|jso|json)?\s*$")
"""The end of a text in which FENCED may begin."""

FUNCTION_NAME = re.compile(r"<function=([^>\n]{1,128})>")
NO_PARAMETERS = re.compile(rf"\s*{FUNCTION_END}")


Part = str | dict[str, Any]
"""A text outside of calls, or a call in OpenAI's format, without index. A call without `id`
continues the arguments of the call before it."""


class ToolParser:
    """Splits one text into content and calls of the given tools, in their order."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._left = ""
        self._is_begin = True  # as long as there was no content
        before_args = (ARGS, HARMONY_ARGS, DEEPSEEK_SEP, KIMI_ARGS)
        names, marks, call_id, args, harmony_type, begins = (
            "|".join(map(re.escape, words))
            for words in (
                *(tools, MARKS, [CALL_ID], before_args, [HARMONY_TYPE]),
                [DEEPSEEK_CALL, KIMI_CALL],
            )
        )
        names = names or "(?!)"
        named = (
            rf"(?P<name>{names})(?::\d++)?\s*+(?:{call_id}\s*+\w+\s*+)?"
            rf"(?:{harmony_type})?+(?:(?:{args}|{FENCE}(?:json)?)\s*+)?(?=\{{)"
        )
        self._named = re.compile(
            rf"(?:{begins})?(?:{DEEPSEEK_NAME}|{re.escape(FUNCTIONS)})?{named}"
        )
        marks_before = (FUNCTION, DEEPSEEK_CALL, DEEPSEEK_NAME, KIMI_CALL, tagged_calls.INVOKE)
        self._words = (*marks_before, FUNCTIONS, *tools)
        self._head = re.compile(rf"\s*+(?P<mark>{marks})?\s*+(?:{named}|(?=[\[{{]))")
        self._heads = [*CLOSINGS, *map("".join, product(("", *MARKS), ("", *tools)))]
        """What a text of calls may begin with, without spaces, besides JSON."""
        self._most_head = 2 * max(map(len, self._heads))
        """Characters of a text that tell whether it begins with one."""
        self._closings: tuple[str, ...] = ()  # what may follow the last call
        self._skipped = ""  # characters to drop between two calls
        self._object = ObjectEnd()
        self._gemma_end = gemma.CallEnd()
        self._tagged_calls = tagged_calls.TaggedCalls(tools)
        self._num_scanned = 0
        """Characters of `_left` that are known not to end a function, or calls of LFM2."""

    def feed(self, text: str) -> list[Part]:
        """What is certain after this part of the text."""
        self._left += text
        return self._take(is_end=False)

    def finish(self) -> list[Part]:
        """The rest."""
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> list[Part]:
        found: list[Part] = []
        while (parts := self._next(is_end)) is not None:
            found += parts
        return found

    def _next(self, is_end: bool) -> list[Part] | None:
        """The next calls or content. None if it is not known yet, or at the end."""
        if self._closings:
            start = len(self._left) - len(self._left.lstrip(SPACE))
            if self._closings == (END,) and self._left.startswith("{", start):
                return self._json(start, (END,), is_end, True)  # the next one, between same marks
            if not self._closed(is_end):
                return None
        self._left = self._left.lstrip(self._skipped)
        if not self._left:
            return None
        start = len(self._left) - len(self._left.lstrip(SPACE)) if self._is_begin else 0
        for mark in CLOSINGS:
            if self._left.startswith(mark, start):
                return self._tagged(start + len(mark), CLOSINGS[mark], is_end)
        if self._left.startswith(gemma.BEGIN):
            return self._gemma(is_end)
        if self._left.startswith(FUNCTION):
            return self._function(0, (END, SEED_END), is_end)
        if fence := FENCED.match(self._left):
            return self._json(fence.end(), (FENCE,), is_end)
        if self._is_begin:
            is_reading = self._object.num_read > 0  # JSON, so the head is known
            if not (is_end or is_reading) and self._may_be_head():
                return None
            if head := self._head.match(self._left):
                is_marked = head["mark"] is not None
                return self._json(head.end(), (), is_end, is_marked, head["name"])
        return self._other(is_end)

    def _may_be_head(self) -> bool:
        """Whether the text so far may continue as one of `_heads`."""
        text = "".join(self._left.lstrip()[: self._most_head].split())
        return any(head.startswith(text) for head in self._heads)

    def _closed(self, is_end: bool) -> bool:
        """Drop what closes the last call, which models sometimes leave out. False if it may still
        come."""
        while self._closings:
            closing, *others = self._closings
            rest = self._left.lstrip(SPACE)
            if rest.startswith(closing):
                self._left = rest[len(closing) :]
            elif closing.startswith(rest):
                if not is_end:
                    return False
                self._left = ""  # the text was cut
            self._closings = tuple(others)
        return True

    def _tagged(self, at: int, closings: tuple[str, ...], is_end: bool) -> list[Part] | None:
        """What follows a mark, which ends at this place."""
        start = len(self._left) - len(self._left[at:].lstrip(SPACE))
        if closings == CLOSINGS[python_calls.BEGIN] and self._left.startswith("[", start):
            inner = self._left[start + 1 :].lstrip(SPACE)
            if not inner and not is_end:
                return None
            if not inner.startswith("{"):
                return self._python(start, closings, is_end)
        if self._left.startswith(("{", "["), start):
            return self._json(start, closings, is_end, True)
        if self._left.startswith(FUNCTION, start):
            return self._function(start, closings, is_end)
        if self._tagged_calls.begins(self._left, start):
            return self._in_tags(start, closings, is_end)
        if named := self._named.match(self._left, start):
            return self._json(named.end(), closings, is_end, name=named["name"])
        rest = self._left[start : start + MOST_HEAD]
        may_be_call = len(rest) < MOST_HEAD and any(
            word.startswith(rest) or rest.startswith(word) for word in self._words
        )
        return None if may_be_call and not is_end else self._content(at)

    def _gemma(self, is_end: bool) -> list[Part] | None:
        """What follows the mark of Gemma 4."""
        rest = self._left[len(gemma.BEGIN) :].lstrip(SPACE)
        if not rest.startswith(gemma.CALL) and (is_end or not gemma.CALL.startswith(rest)):
            return self._content(len(gemma.BEGIN))
        ends = self._gemma_end.read(self._left)
        if ends is None and not is_end:
            return None
        self._gemma_end = gemma.CallEnd()
        end_of_arguments, end = ends or (len(self._left), len(self._left))
        calls = gemma.gemma_calls(self._left[:end_of_arguments], self._tools)
        return self._called(calls, end, ())

    def _in_tags(self, start: int, closings: tuple[str, ...], is_end: bool) -> list[Part] | None:
        """The call at `start`, whose arguments are in tags. With the mark of Hermes, its end is the
        call's."""
        found = self._tagged_calls.read(self._left, start)
        if found is None:
            if not is_end:
                return None
            self._tagged_calls.reset()
            return self._content(len(self._left))
        calls = [typed_call(found.name, found.values, self._tools)]
        return self._called(calls, found.end, () if closings == (END,) else closings)

    def _python(self, start: int, closings: tuple[str, ...], is_end: bool) -> list[Part] | None:
        """The list of calls at `start`, up to the mark that ends it."""
        end = self._left.find(python_calls.END, max(start, self._num_scanned))
        if end < 0 and not is_end:
            self._num_scanned = max(0, len(self._left) - len(python_calls.END))
            return None
        self._num_scanned = 0
        end = end if end >= 0 else len(self._left)
        calls = python_calls.python_calls(self._left[start:end], self._tools)
        return self._called(calls, end, closings)

    def _json(
        self,
        start: int,
        closings: tuple[str, ...],
        is_end: bool,
        is_marked: bool = False,
        name: str | None = None,
    ) -> list[Part] | None:
        """The object or list at `start`; None while it is not complete. closings: what may follow
        a call. is_marked: whether it is known to be calls. name: of the function whose arguments
        it is."""
        size = self._object.read(self._left, start)
        if size is None:
            num_read, is_broken = self._object.num_read, self._object.is_broken
            if not is_broken and not is_end:
                return None
            self._object = ObjectEnd()
            return self._content(start + num_read if is_broken else len(self._left))
        self._object = ObjectEnd()
        text = self._left[start : start + size]
        if name is not None:
            calls = named_calls(name, text)
        else:
            calls = json_calls(text, self._tools, is_marked)
        return self._called(calls, start + size, closings)

    def _function(self, start: int, closings: tuple[str, ...], is_end: bool) -> list[Part] | None:
        """The function at `start`, as Qwen3-Coder writes it; None while it is not complete."""
        header = FUNCTION_NAME.match(self._left, start)
        if header is None or header[1] not in self._tools:
            is_whole = header is not None or re.search(r"[>\n]", self._left[start:]) is not None
            if not is_whole and not is_end:
                return None
            return self._content(start + len(FUNCTION))
        start = len(self._left) - len(self._left[header.end() :].lstrip(SPACE))
        if self._left.startswith("{", start):
            return self._json(start, (FUNCTION_END, *closings), is_end, name=header[1])
        at = self._end_of_function(header.end())
        if at is None:
            return self._content(len(self._left)) if is_end else None
        self._num_scanned = 0
        body = self._left[header.end() : at]
        call = xml_call(header[1], body, self._tools)
        return self._called([call], at + len(FUNCTION_END), closings)

    def _end_of_function(self, start: int) -> int | None:
        """Where FUNCTION_END is that follows the last parameter. A value may contain it."""
        if empty := NO_PARAMETERS.match(self._left, start):
            return empty.end() - len(FUNCTION_END)
        at = self._left.find(FUNCTION_END, max(start, self._num_scanned))
        while at >= 0:
            if self._left[start:at].rstrip(SPACE).endswith("</parameter>"):
                return at
            at = self._left.find(FUNCTION_END, at + 1)
        self._num_scanned = max(0, len(self._left) - len(FUNCTION_END))
        return None

    def _called(
        self, calls: list[dict[str, Any]], end: int, closings: tuple[str, ...]
    ) -> list[Part]:
        """The text up to `end`, which is these calls, or content."""
        if not calls:
            return self._content(end)
        self._left = self._left[end:]
        self._closings, self._skipped = closings, f"{SPACE};"
        return [*calls]

    def _content(self, size: int) -> list[Part]:
        content, self._left = self._left[:size], self._left[size:]
        self._is_begin &= not content.strip(SPACE)
        self._closings, self._skipped = (), ""
        return [content]

    def _other(self, is_end: bool) -> list[Part] | None:
        """Content up to where a call may begin. None if it is not known yet."""
        begins = [self._left.find(mark) for mark in ANYWHERE]
        fence = FENCED.search(self._left)
        begins += [fence.start()] if fence else []
        at = min((begin for begin in begins if begin >= 0), default=-1)
        if at < 0:
            at = len(self._left) if is_end else self._num_certain()
        return self._content(at) if at else None

    def _num_certain(self) -> int:
        """Leading characters of `_left` in which no call can begin."""
        held = max(overlap(self._left, mark) for mark in ANYWHERE)
        fence = BEGINS_FENCE.search(self._left)
        certain = len(self._left) - held
        return min(certain, fence.start()) if fence else certain


class ForcedCallParser:
    """Splits a text of `call_grammar` in JSON into calls. Arguments are passed on as they arrive,
    so a text that was cut is a call that was cut."""

    def __init__(self) -> None:
        self._left = ""
        self._object: ObjectEnd | None = None

    def feed(self, text: str) -> list[Part]:
        self._left += text
        found: list[Part] = []
        while self._left:
            if self._object is None:
                header = HEADER.search(self._left)
                if header is None or header.end() == len(self._left):
                    break
                found.append(new_call(header[1], ""))
                self._left, self._object = self._left[header.end() :], ObjectEnd()
            size = self._object.read(self._left)
            arguments = self._left if size is None else self._left[:size]
            found.append({"function": {"arguments": arguments}})
            self._left = self._left[len(arguments) :]
            self._object.num_read = 0
            if size is not None:
                self._object = None
        return found

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends inside of arguments."""
        return self._object is not None

    def finish(self) -> list[Part]:
        """Nothing: what is left is not a part of arguments."""
        return []


def overlap(text: str, word: str) -> int:
    """Length of the longest end of the text that begins the word."""
    most = min(len(text), len(word) - 1)
    return next((size for size in range(most, 0, -1) if word.startswith(text[-size:])), 0)
