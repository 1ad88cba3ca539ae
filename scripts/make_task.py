"""Write the data of the quickstart: a sentence into a small JSON record. `python scripts/make_task.py`.

Eight phrasings of four kinds of note (meeting, reminder, expense, order) give `train.jsonl` and
`held_out.jsonl`, which share names and words but no sentence; `unseen.jsonl` has phrasings, names and things
that occur nowhere in the other two. Each answer has one right form: fixed keys, no blanks, days as three
letters. The choices come from SHA-256, so every Python writes the same files;
`--check` says whether the files are what this script writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "data" / "sentence_to_json"
SEED = "sentence-to-json-1"
INSTRUCTION = "Turn the sentence into JSON."
SIZES = {"train": 304, "held_out": 64, "unseen": 40}  # multiples of the eight phrasings

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = tuple(f"{hour}:{minute:02d}" for hour in range(10, 20) for minute in (0, 15, 30, 45))


@dataclass(frozen=True)
class Phrasing:
    """A sentence with blanks and the kind of note it is.

    `{number}` is a time of day for `at`, an amount of money for `amount`, a count for `count`.
    """

    kind: str
    last_key: str
    text: str


@dataclass(frozen=True)
class Words:
    """What fills the blanks, by kind of note."""

    names: tuple[str, ...]
    things: dict[str, tuple[str, ...]]


def listed(text: str) -> tuple[str, ...]:
    """Split words at their commas."""
    return tuple(text.split(", "))


PHRASINGS = (
    Phrasing("meeting", "at", "Meet {who} about the {what} on {day} at {number}."),
    Phrasing("meeting", "at", "{day} {number}: meeting with {who} about the {what}."),
    Phrasing("reminder", "at", "Remind {who} to {what} on {day} at {number}."),
    Phrasing("reminder", "at", "Reminder for {who}: {what} on {day} at {number}."),
    Phrasing("expense", "amount", "{who} paid ${number} for {what} on {day}."),
    Phrasing("expense", "amount", "On {day} {what} cost {who} {number} dollars."),
    Phrasing("order", "count", "Order {number} {what} from {who} by {day}."),
    Phrasing("order", "count", "We need {number} {what} on {day}, {who} sells them."),
)
UNSEEN_PHRASINGS = (
    Phrasing("meeting", "at", "There is a meeting about the {what} with {who} on {day} at {number}."),
    Phrasing("meeting", "at", "{who} wants to meet about the {what}, {day} at {number}."),
    Phrasing("reminder", "at", "Please remind {who} on {day} at {number} to {what}."),
    Phrasing("reminder", "at", "{who} needs a reminder to {what} on {day} at {number}."),
    Phrasing("expense", "amount", "For {what} {who} spent ${number} on {day}."),
    Phrasing("expense", "amount", "{day}: {who} bought {what} and paid {number} dollars."),
    Phrasing("order", "count", "By {day} we want {number} {what}, order them from {who}."),
    Phrasing("order", "count", "Please order {number} {what}, {who} delivers on {day}."),
)
WORDS = Words(
    names=listed(
        "Ana, Ben, Carla, David, Emma, Felix, Grace, Hugo, Iris, Jonas, Karen, Leo, Maria, Nina, Oscar, "
        "Paula, Quentin, Rosa, Simon, Tara, Victor, Wendy, Yusuf, Zoe, Alice, Bruno, Clara, Dennis, Elena, "
        "Frank, Helen, Ivan, Julia, Kevin, Laura, Martin, Nora, Peter, Robert, Sara"
    ),
    things={
        "meeting": listed(
            "budget, new roof, contract, school trip, website, garden plan, test results, rent, "
            "summer party, job offer, report, bus timetable"
        ),
        "reminder": listed(
            "call the bank, water the plants, feed the cat, pay the rent, book a table, send the letter, "
            "lock the shed, buy stamps, charge the drill, wash the car, print the tickets, close the windows"
        ),
        "expense": listed(
            "lunch, dinner, train tickets, paint, books, coffee, parking, flowers, printer ink, vegetables, "
            "shoes, bread"
        ),
        "order": listed(
            "chairs, boxes of nails, light bulbs, bags of sand, blue folders, bath towels, apple trees, "
            "batteries, door handles, white shirts, garden hoses, bricks"
        ),
    },
)
UNSEEN_WORDS = Words(
    names=listed("Amir, Beatrice, Colin, Daphne, Edgar, Fiona, Gideon, Hannah, Ingrid, Jasper, Lydia, Miles"),
    things={
        "meeting": listed("water bill, office move, photo album, insurance"),
        "reminder": listed("empty the fridge, wake the children, sign the form, fix the gate"),
        "expense": listed("museum visits, dog food, garden tools, winter tyres"),
        "order": listed("wine glasses, notebooks, rolls of tape, oak shelves"),
    },
)


def choose(items: Sequence[str] | Sequence[int], *key: object) -> str | int:
    """Pick an item by a hash of the key, alike on every Python."""
    digest = hashlib.sha256("/".join(map(str, (SEED, *key))).encode()).digest()
    return items[int.from_bytes(digest[:8], "big") % len(items)]


def make_pair(phrasing: Phrasing, words: Words, *key: object) -> tuple[str, str]:
    """Fill a phrasing and return the sentence with its record."""
    day, who = str(choose(DAYS, *key, "day")), str(choose(words.names, *key, "who"))
    what = str(choose(words.things[phrasing.kind], *key, "what"))
    is_time = phrasing.last_key == "at"
    value = choose(TIMES, *key, "time") if is_time else choose(range(2, 100), *key, "number")
    sentence = phrasing.text.format(who=who, what=what, day=day, number=value)
    record = {
        "kind": phrasing.kind,
        "who": who,
        "what": what,
        "day": day[:3].lower(),
        phrasing.last_key: value,
    }
    return sentence, json.dumps(record, separators=(",", ":"))


def make_rows(name: str, taken: set[str]) -> Iterator[str]:
    """The lines of one file: each phrasing equally often, no sentence that was taken before."""
    is_unseen = name == "unseen"
    phrasings, words = (UNSEEN_PHRASINGS, UNSEEN_WORDS) if is_unseen else (PHRASINGS, WORDS)
    for number in range(SIZES[name]):
        phrasing = phrasings[number % len(phrasings)]
        attempt = 0
        while (pair := make_pair(phrasing, words, name, number, attempt))[0] in taken:
            attempt += 1
        taken.add(pair[0])
        contents = zip(("system", "user", "assistant"), (INSTRUCTION, *pair), strict=True)
        messages = [{"role": role, "content": content} for role, content in contents]
        yield json.dumps({"messages": messages}) + "\n"


def make_files() -> dict[str, str]:
    """The content of every file by its name."""
    taken: set[str] = set()
    return {f"{name}.jsonl": "".join(make_rows(name, taken)) for name in SIZES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the three files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    options = parser.parse_args(arguments)
    differing = []
    for name, content in make_files().items():
        path = options.out / name
        if options.check:
            if not path.is_file() or path.read_bytes() != content.encode():
                differing.append(str(path))
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
        print(f"{path}: {content.count(chr(10))} rows")
    for path_name in differing:
        print(f"error: {path_name} is not what this script writes", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
