"""The generator is a pure function, and its answers can be found in its prompts."""

import re
from itertools import islice

import pytest

from smartspec_bench.workloads import ANSWER_MARKER, WORKLOADS, Example, generate, stream


def examples(workload: str, seed: int = 5, count: int = 200) -> list[Example]:
    return [generate(workload, seed, index) for index in range(count)]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_document_is_a_function_of_seed_and_index(workload: str) -> None:
    assert examples(workload) == examples(workload)
    prompts = {e.prompt for seed in (1, 2, 3) for e in examples(workload, seed)}
    assert len(prompts) == 3 * 200


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompt_names_its_task_and_ends_with_the_marker(workload: str) -> None:
    for example in examples(workload):
        assert example.prompt.startswith(f"Task: {workload}\n")
        assert example.prompt.endswith(ANSWER_MARKER)
        assert example.answer.startswith(" ")
        assert "\n" not in example.answer


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown workload 'poetry'"):
        generate("poetry", 1, 0)


def test_stream_takes_the_workloads_in_turn() -> None:
    taken = list(islice(stream(seed=4), 8))
    assert [e.workload for e in taken] == [*WORKLOADS, *WORKLOADS]
    assert taken[5] == generate(WORKLOADS[1], 4, 1)


def test_qa_answer_is_the_fact_that_was_asked_for() -> None:
    """The question's name picks one sentence of the passage, which holds every fact answered."""
    for example in examples("qa"):
        passage, question = re.match(
            r"Task: qa\nPassage: (.*)\nQuestion: (.*)\nAnswer:", example.prompt
        ).groups()
        name = re.search(r"[A-Z]\w+ [A-Z]\w+", question.split(maxsplit=2)[2]).group()
        sentences = [s for s in passage.split(". ") if re.search(rf"{name} (was|sold)", s)]
        assert len(sentences) == 1
        facts = re.findall(r"[A-Z]\w+|\d+", example.answer.removesuffix("."))
        assert set(facts) - {"The"} <= set(re.findall(r"[A-Z]\w+|\d+", sentences[0]))
        assert example.answer.split()[-1].rstrip(".") in sentences[0]


def test_sql_is_a_function_of_its_prompt() -> None:
    """Each kind of question, worked by hand from its own words."""
    for example in examples("sql"):
        question = example.prompt.split("Question: ")[1].removesuffix(ANSWER_MARKER)
        assert example.answer == f" {query(question)}"


def query(question: str) -> str:
    """An independent reading of the three kinds of question."""
    kind = question.split()[0]
    if kind == "List":
        pattern = r"List (\w+) and (\w+) from (\w+) where (.+), (\w+) (\w+) first, (\d) rows\.$"
        a, b, table, test, direction, key, limit = re.match(pattern, question).groups()
        order = "DESC" if direction == "highest" else "ASC"
        tail = f"ORDER BY {key} {order} LIMIT {limit};"
        return f"SELECT {a}, {b} FROM {table} WHERE {sql_test(test)} {tail}"
    if kind == "Find":
        pattern = r"Find the (\w+) (\w+) from (\w+) for each (\w+) where (.+)\.$"
        name, a, table, b, test = re.match(pattern, question).groups()
        function = {"average": "AVG", "total": "SUM", "largest": "MAX", "smallest": "MIN"}[name]
        tail = f"GROUP BY {b} ORDER BY {b};"
        return f"SELECT {b}, {function}( {a} ) FROM {table} WHERE {sql_test(test)} {tail}"
    pattern = r"Join (\w+) with (\w+) by (\w+) and list (\w+) and (\w+) where (.+)\.$"
    table, other, key, a, b, test = re.match(pattern, question).groups()
    return f"SELECT {a}, {b} FROM {table} JOIN {other} USING ( {key} ) WHERE {sql_test(test)};"


def sql_test(words: str) -> str:
    column, rest = words.split(" is ")
    if rest.startswith("'"):
        return f"{column} = {rest}"
    comparison, bound = rest.rsplit(" ", 1)
    symbol = {"above": ">", "below": "<"}[comparison]
    return f"{column} {symbol} {bound}"


def test_summary_copies_the_names_and_numbers_of_the_report() -> None:
    for example in examples("summarize"):
        facts = set(re.findall(r"\d+|\b[A-Z]\w{3,}", example.answer))
        assert len(facts) >= 9
        assert facts <= set(re.findall(r"\w+", example.prompt))


def test_chat_needs_more_than_one_byte_a_character() -> None:
    """At least two-byte letters, the three-byte dash and four-byte emoji appear in answers."""
    text = "".join(e.answer for e in examples("chat"))
    assert {len(character.encode()) for character in text} == {1, 2, 3, 4}
