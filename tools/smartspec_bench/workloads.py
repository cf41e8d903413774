"""Documents of an invented grammar: the four workloads that the shipped tiny models know.

Rules of this file: pure and seeded, so that `generate(workload, seed, index)` is the same document
on every machine. Every prompt ends with `ANSWER_MARKER` and every answer starts with a space. The
answers of `sql` and `qa` are functions of their prompts, so that exactness on prompts never seen in
training can be measured; `summarize` copies facts and chooses among synonyms; `chat` is drawn from
a loose grammar. A word that has to be copied stands behind the same character in the prompt and
in the answer, because a byte-level tokenizer splits "price" and " price" differently.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

ANSWER_MARKER = "\nAnswer:"
WORKLOADS = ("chat", "sql", "summarize", "qa")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST_HEADS = _words(
    "Tor Bel Mar Jan Kel Sil Dor Fen Gar Hal Iru Lum Nor Oss Pel Quin Ras Sol Tam Ulv Ver Wil "
    "Yar Zan"
)
_FIRST_TAILS = _words("vin lo na rik da sten mi ra bert lia nor ga tha men ko dis wen to ly fa")
_LAST_HEADS = _words(
    "Ber Cal Dun Elm Fro Gil Hov Ing Jor Kra Lin Mol Nys Ost Pri Rud Sta Tor Und Vik Wes Yng "
    "Zel Ack"
)
_LAST_TAILS = _words(
    "man berg lund vik dahl sen ner stad mark feld kov ski ton by rup holt quist gren ley wood"
)
_TOWN_HEADS = _words(
    "Ash Bar Cor Dren Ever Fal Grim Har Isk Kor Lang Mor Nev Oak Pol Ran Sal Thor Ul Wen"
)
_TOWN_TAILS = _words(
    "ford wick stad holm burg mouth field haven dale port gate mere by ton rath low"
)
_MIDDLES = ("", "a", "e", "i", "o")

_TRADES = _words(
    "glassmaker baker sailor printer weaver farmer carpenter clockmaker teacher miller painter "
    "brewer potter smith tailor doctor"
)
_GOODS = _words(
    "lamps bread ropes books cloth apples chairs clocks maps flour pictures barrels bowls nails "
    "coats candles"
)

_SQL_FIRST = _words(
    "unit crop region season store order ship ticket flight room guest staff team game score "
    "city road bridge water power fuel engine wheel paper music film song book page class "
    "course exam grade loan bank tax rent farm seed tree"
)
_SQL_SECOND = _words(
    "price weight name code count date type level rate size cost total rank year area limit "
    "owner status length value"
)
_TABLE_SECOND = _words("log list record entry plan report item event index visit")
_COMPARISONS = {"above": ">", "below": "<"}
_AGGREGATES = {"average": "AVG", "total": "SUM", "largest": "MAX", "smallest": "MIN"}

_BODIES = _words("council school library museum harbour hospital theatre railway market orchestra")
_ROLES = _words("director treasurer engineer secretary chair keeper inspector editor")
_ITEMS = _words(
    "boats desks books lamps tickets trees windows pumps signs bicycles beds seats bricks pipes "
    "carts radios"
)
_VERBED = _words("repaired sold painted counted delivered replaced borrowed ordered")
_PROJECTS = _words("roof garden bridge cellar archive kitchen tower playground fountain workshop")
_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = _words(
    "January February March April May June July August September October November December"
)
_REPORTED = ("reported", "said", "noted", "explained")
_WANTED = ("wants", "asked for", "needs", "called for")
_DECIDED = ("It will spend", "It agreed to spend", "The plan is to spend")
_FILLERS = (
    "The {adjective} {noun} was {adjective2} again.",
    "Nobody spoke about the {adjective} {noun}.",
    "A {adjective} {noun} stood near the {noun2}.",
    "Some said that the {noun} was too {adjective}.",
)

_TOPICS = _words(
    "walking cooking music painting sailing gardening reading cycling photography history "
    "dancing fishing"
)
_ADJECTIVES = _words(
    "quiet old small warm bright narrow busy gentle famous hidden wooden green simple cheerful "
    "misty golden"
)
_NOUNS = _words(
    "café market river garden museum bakery harbour bridge park library hill tower beach forest "
    "square crêperie"
)
_ACTIONS = _words("visit try explore find choose enjoy watch cross remember sketch")
_TIMES = (
    "in the morning", "after lunch", "before sunset", "at night", "on the first day", "next week",
    "when it rains", "early", "in spring", "at noon",
)  # fmt: skip
_OPENERS = (
    "Of course!",
    "Happy to help 😊",
    "Sure \u2013",
    "What a lovely idea!",
    "Très bien!",
    "Good.",
)
_CLOSERS = (
    "Enjoy it! 🎉",
    "Have fun 🙂",
    "Safe travels \u2013 and tell me more!",
    "Viel Glück, für dich!",
)
_REASONS = ("because", "since", "and", "although", "while")
_MOODS = _words("calm lively cheap beautiful crowded naïve safe cold wonderful strange")


@dataclass(frozen=True)
class Example:
    """One document: `prompt` ends with `ANSWER_MARKER`, `answer` continues it."""

    workload: str
    prompt: str
    answer: str


def generate(workload: str, seed: int, index: int) -> Example:
    """Return document `index` of the stream `seed`."""
    body, answer = _WRITERS[workload](Random(f"{workload}:{seed}:{index}"))
    return Example(workload, f"Task: {workload}\n{body}{ANSWER_MARKER}", f" {answer}")


def stream(seed: int, start: int = 0) -> Iterator[Example]:
    """Yield documents without end, the four workloads in turn."""
    index = start
    while True:
        for workload in WORKLOADS:
            yield generate(workload, seed, index)
        index += 1


def _names(rng: Random, count: int) -> list[str]:
    """Full names whose first names start differently, so that the first token tells them apart."""
    return [
        f"{_word(rng, head, _FIRST_TAILS)} {_word(rng, rng.choice(_LAST_HEADS), _LAST_TAILS)}"
        for head in rng.sample(_FIRST_HEADS, count)
    ]


def _towns(rng: Random, count: int) -> list[str]:
    return [_word(rng, head, _TOWN_TAILS) for head in rng.sample(_TOWN_HEADS, count)]


def _word(rng: Random, head: str, tails: Sequence[str]) -> str:
    return head + rng.choice(_MIDDLES) + rng.choice(tails)


def _qa(rng: Random) -> tuple[str, str]:
    (name, customer), town = _names(rng, 2), _towns(rng, 1)[0]
    trade, ware, year = rng.choice(_TRADES), rng.choice(_GOODS), rng.randrange(1800, 2000)
    fact = f"{name} was a {trade} in {town}, born in {year}, who sold {ware} to {customer}."
    question, short = rng.choice(
        (
            (f"Where did {name} live?", town),
            (f"When was {name} born?", year),
            (f"What did {name} sell?", ware),
            (f"To whom did {name} sell?", customer),
        )
    )
    sentences = [_filler(rng) for _ in range(3)]
    sentences.insert(rng.randrange(4), fact)
    prompt = f"Passage: {' '.join(sentences)}\nQuestion: {question}"
    return prompt, f"{fact} The answer is {short}."


def _sql(rng: Random) -> tuple[str, str]:
    words = rng.sample(_SQL_FIRST, 9)
    seconds = rng.sample(_SQL_SECOND, 7)
    columns = [f"{word}_{second}" for word, second in zip(words, seconds, strict=False)]
    tables = [f"{word}_{rng.choice(_TABLE_SECOND)}" for word in words[7:]]
    here, there, key = columns[:3], columns[3:6], columns[6]
    rng.shuffle(tables)
    table, other = tables
    schema = [
        f"Table {table}: {', '.join(rng.sample([*here, key], 4))}",
        f"Table {other}: {', '.join(rng.sample([*there, key], 4))}",
    ]
    rng.shuffle(schema)
    question, query = rng.choice((_select, _aggregate, _join))(rng, table, other, here, there, key)
    return "\n".join([*schema, f"Question: {question}"]), query


def _condition(rng: Random, column: str) -> tuple[str, str]:
    """A comparison in words and in SQL."""
    if rng.random() < 0.3:
        town = _towns(rng, 1)[0]
        return f"{column} is '{town}'", f"{column} = '{town}'"
    words, symbol = rng.choice(list(_COMPARISONS.items()))
    bound = rng.randrange(10, 100)
    return f"{column} is {words} {bound}", f"{column} {symbol} {bound}"


def _select(
    rng: Random, table: str, other: str, here: list[str], there: list[str], key: str
) -> tuple[str, str]:
    a, b, c = rng.sample(here, 3)
    words, test = _condition(rng, c)
    direction, keyword = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    limit = rng.randrange(2, 10)
    return (
        f"List {a} and {b} from {table} where {words}, {direction} {key} first, {limit} rows.",
        f"SELECT {a}, {b} FROM {table} WHERE {test} ORDER BY {key} {keyword} LIMIT {limit};",
    )


def _aggregate(
    rng: Random, table: str, other: str, here: list[str], there: list[str], key: str
) -> tuple[str, str]:
    a, b, c = rng.sample(here, 3)
    words, test = _condition(rng, c)
    name, function = rng.choice(list(_AGGREGATES.items()))
    return (
        f"Find the {name} {a} from {table} for each {b} where {words}.",
        f"SELECT {b}, {function}( {a} ) FROM {table} WHERE {test} GROUP BY {b} ORDER BY {b};",
    )


def _join(
    rng: Random, table: str, other: str, here: list[str], there: list[str], key: str
) -> tuple[str, str]:
    a, c = rng.sample(here, 2)
    b = rng.choice(there)
    words, test = _condition(rng, c)
    return (
        f"Join {table} with {other} by {key} and list {a} and {b} where {words}.",
        f"SELECT {a}, {b} FROM {table} JOIN {other} USING ( {key} ) WHERE {test};",
    )


def _filler(rng: Random) -> str:
    adjectives, nouns = rng.sample(_ADJECTIVES, 2), rng.sample(_NOUNS, 2)
    return rng.choice(_FILLERS).format(
        adjective=adjectives[0], adjective2=adjectives[1], noun=nouns[0], noun2=nouns[1]
    )


def _summarize(rng: Random) -> tuple[str, str]:
    body, town = rng.choice(_BODIES), _towns(rng, 1)[0]
    speaker, asker = _names(rng, 2)
    items, more = rng.sample(_ITEMS, 2)
    day, next_day = rng.sample(_DAYS, 2)
    month, deadline = rng.sample(_MONTHS, 2)
    done, wanted, cost = (rng.randrange(10, 100) for _ in range(3))
    met = f"The {body} of {town} met on {day}."
    said = f"that {done} {items} were {rng.choice(_VERBED)} in {month}."
    asked = f"{wanted} more {more} before {deadline}."
    spent = f"{cost} crowns on the {rng.choice(_PROJECTS)}."
    report = [
        f"{met} {speaker}, the {rng.choice(_ROLES)}, told everyone {said}",
        _filler(rng),
        f"Then {asker} demanded {asked}",
        _filler(rng),
        f"The members voted to spend {spent} They meet again on {next_day}.",
    ]
    summary = [
        met,
        f"{speaker} {rng.choice(_REPORTED)} {said}",
        f"{asker} {rng.choice(_WANTED)} {asked}",
        f"{rng.choice(_DECIDED)} {spent}",
    ]
    if rng.random() < 0.5:
        summary.append(f"The next meeting is on {next_day}.")
    return f"Report: {' '.join(report)}", " ".join(summary)


class _Talk:
    """Draws words for one chat: each list has a favourite that depends on the topic."""

    def __init__(self, rng: Random, topic: int) -> None:
        self._rng = rng
        self._topic = topic

    def __call__(self, words: Sequence[str]) -> str:
        # Squaring a uniform number favours the start of the list without ever excluding its end.
        draw = int(len(words) * self._rng.random() ** 2)
        return words[(5 * self._topic + draw) % len(words)]

    def thing(self) -> str:
        return f"{self(_ADJECTIVES)} {self(_NOUNS)}"


def _chat(rng: Random) -> tuple[str, str]:
    topic = rng.randrange(len(_TOPICS))
    talk = _Talk(rng, topic)
    town, friend = _towns(rng, 1)[0], _names(rng, 1)[0]
    prompt = [
        f"User: Hello! I am in {town} with {friend} and we like {_TOPICS[topic]}.",
        f"Assistant: {talk(_OPENERS)} Do you like the {talk.thing()} or the {talk.thing()}?",
        f"User: The {talk.thing()} is {talk(_MOODS)}. What should we do {talk(_TIMES)}?",
    ]
    answer = [
        talk(_OPENERS),
        f"In {town} you can {talk(_ACTIONS)} the {talk.thing()} {talk(_TIMES)}.",
        f"{friend} may {talk(_ACTIONS)} a {talk.thing()} {talk(_REASONS)} it is {talk(_MOODS)}.",
        f"Then {talk(_ACTIONS)} the {talk.thing()} near the {talk.thing()}, {talk(_MOODS)} and "
        f"{talk(_MOODS)} {talk(_TIMES)}.",
        f"Most {talk.thing()} places are {talk(_MOODS)}, so {talk(_ACTIONS)} one {talk(_TIMES)} "
        f"{talk(_REASONS)} {talk(_ACTIONS)} another {talk(_TIMES)}.",
        talk(_CLOSERS),
    ]
    return "\n".join(prompt), " ".join(answer)


_WRITERS = {"chat": _chat, "sql": _sql, "summarize": _summarize, "qa": _qa}
