"""Write prompts for the training of a head: four kinds of tasks from lists of words.

Chat, requests for passages, and SQL come from the lists alone. Summaries and questions are about
given passages, for example the answers to the requests for passages. No prompt is one of those in
tools/smartspec_bench/texts.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random

WORDS = Path(__file__).with_name("prompts")


def lines(name: str) -> list[str]:
    return (WORDS / f"{name}.txt").read_text().splitlines()


def chat(random: Random) -> str:
    return random.choice(lines("chat")).format(*random.sample(lines("topics"), 2))


def passage_request(random: Random) -> str:
    form, topic, place = (random.choice(lines(one)) for one in ("passages", "topics", "places"))
    return form.format(t=topic, p=place)


def sql(random: Random) -> str:
    tables = [line.split(": ") for line in lines("tables")]
    first = random.randrange(len(tables) - 1)
    chosen = tables[first : first + random.randint(1, 2)]
    (name, columns), other = chosen[0], chosen[-1][0]
    pairs = [one.split() for one in columns.split(",")]
    numbers = [column for column, kind in pairs if kind in ("INT", "REAL", "NUMERIC")]
    words = [column for column, kind in pairs if kind == "TEXT"] or [pairs[0][0]]
    question = random.choice(lines("sql_questions")).format(
        t=name,
        u=other,
        c=random.choice(words),
        n=random.choice(numbers),
        k=random.choice([2, 3, 5, 10, 20, 100]),
    )
    schema = "\n".join(f"CREATE TABLE {table} ({of});" for table, of in chosen)
    forms = (WORDS / "sql.txt").read_text().strip().split("\n----\n")
    return random.choice(forms).format(s=schema, q=question)


def about_passages(file: Path, random: Random) -> list[str]:
    found = []
    for passage in (one.strip() for one in file.read_text().split("\n----\n")):
        if 300 <= len(passage) <= 1500:
            for name in ("summaries", "questions"):
                both = [passage, random.choice(lines(name))]
                random.shuffle(both)
                found.append("\n\n".join(both))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--kind", choices=["chat", "passages", "sql", "about"], required=True)
    parser.add_argument("--passages", type=Path, help="passages for the kind `about`")
    parser.add_argument("--num", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random = Random(args.seed)
    makers: dict[str, Callable[[Random], str]] = {
        "chat": chat,
        "passages": passage_request,
        "sql": sql,
    }
    if args.kind == "about":
        prompts = about_passages(args.passages, random)
    else:
        prompts = [makers[args.kind](random) for _ in range(args.num)]
    args.out.write_text("\n----\n".join(dict.fromkeys(prompts)) + "\n")
    print(f"{len(set(prompts))} prompts")


if __name__ == "__main__":
    main()
