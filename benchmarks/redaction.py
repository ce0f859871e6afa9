"""What the built-in rules of redaction find among look-alikes, and what they cost.

Half of a seeded set of short prompts have one private value each, the others only look-alikes. The values are made as
their issuers make them: cards and IBANs by their checksums, keys at random behind a prefix, phones by the printed
formats of 28 countries, addresses of machines by :mod:`random`; none by a rule's own pattern. A value is found if a
span has its kind and exactly its characters; any other span is wrong.

The cost is that of :meth:`gateway.redaction.rules.Rules.spans` over the set, and over the pages of this repository as
plain text; 1,000 tokens are 4,000 characters. Prints JSON: recall and precision, altogether and of each kind, what was
missed and what is wrong, and milliseconds of the processor per 1,000 tokens: the best of five passes, and that of
``private``, which answers only yes or no.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import string
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

from gateway.redaction.identifiers import Span
from gateway.redaction.rules import Rules

spans, private = Rules().spans, Rules().private

_CHARS_PER_TOKEN = 4
_PAGES = Path(__file__).parent.parent / "docs"


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines()


def _split(text: str) -> list[str]:
    return [entry for line in _lines(text) for entry in line.split("|")]


#: ``#``: any digit, ``N``: 2 to 9, ``M``: 1 to 9; as directories and businesses of the countries print them.
_PHONES = _split("""
+1 NNN-N##-####|(NNN) N##-####|NNN-N##-####|NNN.N##.####|1-NNN-N##-####|+1 (NNN) N##-####|+1NNNN######
+44 20 7### ####|020 7### ####|+44 (0)20 7### ####|07### ######|+447#########|0161 ### ####
+49 30 M#######|030 M######|0171 M######|0171/M######|+49 (0)89 M#####-##|089-M######|+4917########|(0221) M#####
0049 30 M######|+33 6 ## ## ## ##|06 ## ## ## ##|01.##.##.##.##|+33 (0)1 ## ## ## ##
+34 6## ### ###|+39 06 M### ####|+39 3## #######|+351 91# ### ###|+31 6 M#######|06-M#######|020-M## ####
+41 44 M## ## ##|044 M## ## ##|+43 1 M######|+43 664 M######|+46 70-M## ## ##|070-M## ## ##|+47 9## ## ###
+45 ## ## ## ##|+48 6## ### ###|+420 7## ### ###|+30 21# ### ####|+353 1 M## ####|+91 98### #####|+91-98########
+86 138 #### ####|+81 3-####-####|03-####-####|+82 10-M###-####|010-M###-####|+55 11 9####-####|(11) 9####-####
+52 55 #### ####|+61 4## ### ###|0412 ### ###|(02) 9### ####|+64 21 ### ####|+27 82 ### ####|+972 5#-###-####
+65 9### ####|+380 44 M## ## ##
""")
#: Numbers without a form of their own, behind a word for what they are.
_SAID_PHONES = _split(
    "Tel: |#########|phone |01M########|mobile: |98########|call me at |555-####|WhatsApp |6## ### ###"
)

_NAMES = _split(
    "anna.schmidt|j.doe|maria_garcia|o'brien|li.wei|sales|support+eu|x|bob99|jean-luc.picard|müller|tom%home"
)
_HOSTS = _split("example.com|mail.example.co.uk|uni-bonn.de|acme.io|post.at|sub.dept.school.edu|firma.gmbh|münchen.de")
#: Account numbers by country: ``n`` digit, ``c`` capital letter or digit, ``a`` capital letter.
_ACCOUNTS = {
    "DE": "n" * 18, "AT": "n" * 16, "CH": "n" * 5 + "c" * 12, "FR": "n" * 10 + "c" * 11 + "nn", "ES": "n" * 20,
    "IT": "a" + "n" * 10 + "c" * 12, "NL": "aaaa" + "n" * 10, "GB": "aaaa" + "n" * 14, "PL": "n" * 24, "BE": "n" * 12,
    "NO": "n" * 11, "MT": "aaaa" + "n" * 5 + "c" * 18,
}  # fmt: skip
_ISSUERS = [("4", 16), ("4", 13), ("4", 19), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("37", 15), ("6011", 16),
            ("65", 16), ("36", 14), ("3528", 16), ("62", 16)]  # fmt: skip
_BASE62 = string.ascii_letters + string.digits
_BASE64URL = _BASE62 + "-_"

_AROUND = _lines(r"""
Hello, I ordered two chairs last week and one leg is broken. {} Could you send a new one before Friday?
Please rewrite this mail so that it sounds friendlier: 'Dear team, {} I expect an answer.' Keep it below 80 words.
{}
The log of the night:\n2026-03-14 02:11:09 INFO worker 3 started\n2026-03-14 02:11:10 WARN retry: {}\nWhat went wrong?
def connect(timeout=30):\n    # {}\n    return Session(timeout=timeout, retries=3)\n\nWhy does this fail after an hour?
| field | value |\n| --- | --- |\n| note | {} |\n| state | open |\nTurn the table into JSON.
{} Thanks in advance, and have a nice weekend!
Summarise for my manager, in three points. The customer wrote: "{}" We answered on Tuesday that we look into it.
""")
#: Of those some stand around each text, so that it has the length of a short prompt.
_MORE = _lines("""\
The delivery was announced for Monday but it came two days later, and nobody had told us about it.
I have already tried to turn it off and on again, as the manual says on its third page.
Our shop opens at nine; before that only the warehouse can be reached, and they do not know the contract.
The function reads the file, splits each line at the comma and adds up the third column, but the sum is wrong.
Write in plain English, with short sentences, and do not use the passive voice where it can be avoided.
The build passes on my machine and fails in the pipeline with a timeout after the second stage.
We would like to move from a monthly to a yearly plan and keep the discount of last spring.
Please answer with a table that has one row per country and the columns capital, currency and population.
The patient slept well, had no fever and asked when the next appointment with the doctor could be.
If the cache is cold, the first request takes about three seconds, and all later ones less than one.
""")
_SAYING = {
    "email": ["Write to {} please.", "My address is {}.", "from: <{}>", "mailto:{}", "user={};", "({})", "{} wrote:"],
    "phone": ["You reach me at {}.", "Tel. {}", "{}", "My number: {}, after six.", "phone={}", "Anna ({}) knows more."],
    "iban": ["Please refund to {}.", "IBAN: {}", "{}", "account={};", "(IBAN {})"],
    "card": ["I paid with {}.", "card: {}", "{} was charged twice.", '"card_number": "{}"', "Visa/MC {}, exp 12/27"],
    "secret": ["export API_KEY={}", "the key is {}", '"token": "{}"', "Authorization: Bearer {}", "{}"],
    "ip": ["Login from {}.", "host {} is down", "{} - - [14/Mar/2026] GET /", "ssh root@{}", "addr={};", "http://{}/a"],
}  # fmt: skip


class Making:
    """Values and look-alikes, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def filled(self, form: str) -> str:
        draws = {"#": string.digits, "N": "23456789", "M": "123456789"}
        return "".join(self.random.choice(draws[mark]) if mark in draws else mark for mark in form)

    def drawn(self, alphabet: str, count: int) -> str:
        return "".join(self.random.choices(alphabet, k=count))

    def grouped(self, text: str, size: int = 4) -> str:
        return " ".join(text[at : at + size] for at in range(0, len(text), size))

    # ------------------------------------------------------------------ private values

    def email(self) -> str:
        return f"{self.random.choice(_NAMES)}@{self.random.choice(_HOSTS)}"

    def phone(self) -> str:
        return self.filled(self.random.choice(_PHONES))

    def iban(self, shift: int = 0) -> str:
        country, account = self.random.choice(list(_ACCOUNTS.items()))
        kinds = {"n": string.digits, "a": string.ascii_uppercase, "c": string.ascii_uppercase + string.digits}
        body = "".join(self.random.choice(kinds[kind]) for kind in account)
        number = int("".join(str(int(mark, 36)) for mark in f"{body}{country}00"))
        check = (98 - number % 97 + shift) % 97
        text = f"{country}{check:02}{body}"
        return self.grouped(text) if self.random.random() < 0.5 else text

    def card(self, shift: int = 0) -> str:
        prefix, length = self.random.choice(_ISSUERS)
        digits = prefix + self.drawn(string.digits, length - len(prefix) - 1)
        total = 0
        for place, mark in enumerate(reversed(digits)):
            value = int(mark) * (2 if place % 2 == 0 else 1)
            total += value - 9 if value > 9 else value
        text = digits + str((10 - total % 10 + shift) % 10)
        if length == 16 and self.random.random() < 0.5:
            return self.grouped(text).replace(" ", self.random.choice(" -"))
        if length == 15 and self.random.random() < 0.5:
            return f"{text[:4]} {text[4:10]} {text[10:]}"
        return text

    def secret(self) -> str:
        draw = self.drawn
        return self.random.choice(
            [
                lambda: f"sk-{draw(_BASE62, 48)}",
                lambda: f"sk-proj-{draw(_BASE64URL, 63)}{draw(_BASE62, 1)}",
                lambda: f"sk-ant-api03-{draw(_BASE64URL, 93)}AA",
                lambda: f"ghp_{draw(_BASE62, 36)}",
                lambda: f"github_pat_{draw(_BASE62, 22)}_{draw(_BASE62, 59)}",
                lambda: f"AKIA{draw(string.ascii_uppercase + '234567', 16)}",
                lambda: f"xoxb-{draw(string.digits, 12)}-{draw(string.digits, 13)}-{draw(_BASE62, 24)}",
                lambda: f"AIza{draw(_BASE64URL, 34)}{draw(_BASE62, 1)}",
                lambda: f"hf_{draw(_BASE62, 34)}",
                lambda: f"glpat-{draw(_BASE64URL, 19)}{draw(_BASE62, 1)}",
                lambda: f"sk_live_{draw(_BASE62, 24)}",
                self.jwt,
                self.pem,
            ]
        )()

    def jwt(self) -> str:
        parts = [
            {"alg": self.random.choice(["HS256", "RS256"]), "typ": "JWT"},
            {"sub": self.drawn(_BASE62, 10), "iat": 1},
        ]
        encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
        return ".".join([*encoded, self.drawn(_BASE62, 43)])

    def pem(self) -> str:
        kind = self.random.choice(["RSA ", "EC ", "OPENSSH ", ""])
        text = base64.b64encode(self.random.randbytes(200)).decode()
        lines = [text[at : at + 64] for at in range(0, len(text), 64)]
        return "\n".join([f"-----BEGIN {kind}PRIVATE KEY-----", *lines, f"-----END {kind}PRIVATE KEY-----"])

    def ip(self) -> str:
        if self.random.random() < 0.6:
            # none of 127/8, which names no machine
            return str(IPv4Address(self.random.choice([1 << 24, 128 << 24]) + self.random.randrange(95 << 24)))
        nets = [0x2001 << 112, 0x2A02 << 112, 0xFE80 << 112, 0xFD00 << 112]
        bits = self.random.choice([16, 64, 112])
        return str(IPv6Address(self.random.choice(nets) + self.random.randrange(1, 1 << bits)))

    # ------------------------------------------------------------------ look-alikes

    def look_alike(self) -> str:
        number, draw, pick = self.random.randrange, self.drawn, self.random.choice
        hexadecimal, digits = string.hexdigits.lower()[:16], string.digits
        makers: list[Callable[[], str]] = [
            # order numbers and ids
            lambda: f"order {draw(digits, 10)}",
            lambda: f"order no. {number(100, 999)}-{draw(digits, 7)}-{draw(digits, 7)}",
            lambda: f"invoice 2026-{draw(digits, 6)}",
            lambda: f"ticket {self.filled('NNN-N##-####')}",
            lambda: f"case number 0{draw(digits, 9)}",
            lambda: f"ref {draw(digits, 3)} {draw(digits, 3)} {draw(digits, 4)}",
            lambda: f"part no {self.filled('0M##-####-##')}",
            lambda: f"tracking 00{draw(digits, 18)}",
            lambda: f"id={draw(digits, 12)}",
            lambda: f"ISBN 978-3-{draw(digits, 2)}-{draw(digits, 6)}-{number(0, 9)}",
            lambda: f"#{draw(digits, 8)}",
            lambda: f"SKU {draw(string.ascii_uppercase, 2)}{draw(digits, 10)}",
            # cards and IBANs with a wrong checksum
            lambda: f"number {self.card(number(1, 9))}",
            lambda: f"reference {self.iban(number(1, 90))}",
            lambda: str(uuid.UUID(int=self.random.getrandbits(128))),
            # hashes
            lambda: f"commit {draw(hexadecimal, 40)}",
            lambda: f"sha256:{draw(hexadecimal, 64)}",
            lambda: draw(_BASE62 + "+/", 86) + "==",
            lambda: ":".join(draw(hexadecimal, 2) for _ in range(pick([6, 8, 16, 20]))),
            # versions
            lambda: f"v{number(0, 9)}.{number(0, 30)}.{number(0, 99)}.{number(0, 99)}",
            lambda: f"version {number(1, 200)}.{number(0, 30)}.{number(0, 200)}.{number(0, 200)}",
            lambda: f"pkg=={number(1, 9)}.{number(0, 9)}.{number(0, 9)}.{number(0, 9)}",
            lambda: f"libfoo.so.{number(1, 9)}.{number(0, 9)}.{number(0, 9)}.{number(0, 9)}",
            lambda: f"driver-{number(300, 600)}.{number(10, 99)}.{number(0, 9)}.{number(0, 9)}",
            lambda: f"OID 1.3.6.1.4.1.{number(1, 9999)}.{number(1, 9)}",
            lambda: f"section {number(1, 9)}.{number(1, 9)}.{number(1, 9)}.{number(1, 9)}",
            lambda: f"{number(1, 9)}.{number(0, 30)}.{number(0, 99)}",
            # dates, times, amounts, places
            lambda: f"{number(10, 28)}.0{number(1, 9)}.2026 {number(10, 23)}:{number(10, 59)}",
            lambda: f"0{number(1, 9)}/{number(10, 28)}/2026 - 0{number(1, 9)}/{number(10, 28)}/2027",
            lambda: f"2026-0{number(1, 9)}-{number(10, 28)}T{number(10, 23)}:{number(10, 59)}:{number(10, 59)}+02:00",
            lambda: f"{number(10, 23)}:{number(10, 59)}:{number(10, 59)}.{draw(digits, 6)}",
            lambda: f"EUR {number(1, 999)}.{draw(digits, 3)}.{draw(digits, 3)},{draw(digits, 2)}",
            lambda: f"{number(1, 90)}.{draw(digits, 6)}, {number(1, 90)}.{draw(digits, 6)}",
            lambda: f"timestamp {1_700_000_000 + number(0, 10**8)}",
            lambda: f"epoch 17{draw(digits, 11)}",
            lambda: f"{number(2, 99)} {number(100, 999)} {number(100, 999)} km",
            lambda: f"0.{draw(digits, 16)}",
            lambda: f"{number(1900, 2020)}-{number(2021, 2099)}, pages {number(100, 200)}-{number(201, 400)}",
            # addresses that are none
            lambda: f"git@github.com:acme/{draw(string.ascii_lowercase, 6)}.git",
            lambda: f"icon@{number(2, 4)}x.png",
            lambda: f"react@{number(10, 19)}.{number(0, 9)}.0",
            lambda: f"@app.route and @{draw(string.ascii_lowercase, 7)}",
            lambda: f"y = W@{draw(string.ascii_lowercase, 1)}.mean()",
            lambda: f"https://{draw(string.ascii_lowercase, 6)}@host.example.org/path",
            lambda: pick(["127.0.0.1:8080", "255.255.255.0", "0.0.0.0", "::1", "[::]:80"]),
            lambda: pick(["std::vec", "face::add", "abc::def", "a::b::c", "Foo::Bar1", "cafe::f32::bad"]),
            lambda: f"{number(256, 999)}.{number(1, 999)}.{number(1, 999)}.{number(1, 999)}",
            # names that begin like keys
            lambda: f"sk-{pick(['fading-circle', 'chasing-dots', 'cube-grid'])}-animation-delay-{number(1, 99)}",
            lambda: f"sk_live_{pick(['mode', 'key_of_yours', 'xxxx'])}",
            lambda: f"ghp_{'x' * number(4, 20)}",
            lambda: f"MAKIA{draw(string.ascii_uppercase, 16)}",
            lambda: f"eyJ{draw(_BASE62, 20)}.{draw(_BASE62, 30)}.{draw(_BASE62, 30)}",
            lambda: "-----BEGIN CERTIFICATE-----\n" + draw(_BASE62, 64) + "\n-----END CERTIFICATE-----",
            lambda: "the line '-----BEGIN PRIVATE KEY-----' begins one",
        ]
        return pick(makers)()

    def case(self, kind: str) -> tuple[str, Span | None]:
        """One text, and its private part; ``kind`` ``""``: it has none."""
        around = self.random.choice(_AROUND).replace("\\n", "\n")
        before, behind = (" ".join(self.random.sample(_MORE, self.random.randrange(1, 5))) for _ in range(2))
        around = f"{before}\n\n{around}\n\n{behind}"
        if not kind:
            return around.format(self.look_alike()), None
        value: str = getattr(self, kind)()
        saying = self.random.choice(_SAYING[kind])
        if kind == "phone" and self.random.random() < 0.1:
            at = self.random.randrange(0, len(_SAID_PHONES), 2)
            saying, value = f"{_SAID_PHONES[at]}{{}}", self.filled(_SAID_PHONES[at + 1])
        if kind == "ip" and ":" in value:
            saying = saying.replace("http://{}", "http://[{}]")
        text = around.format(saying.format(value))
        start = text.index(value)
        return text, Span(kind, start, start + len(value))  # pyright: ignore[reportArgumentType]


def cases(seed: int, count: int) -> list[tuple[str, Span | None]]:
    """``count`` texts in random order, half of them with one private part each, of each kind as many."""
    making = Making(seed)
    kinds = [["email", "phone", "iban", "card", "secret", "ip"][at % 6] for at in range(count // 2)]
    made = [making.case(kind) for kind in [*kinds, *[""] * (count - len(kinds))]]
    making.random.shuffle(made)
    return made


def measure(made: Sequence[tuple[str, Span | None]]) -> dict[str, Any]:
    """Recall and precision over ``made``."""
    planted, right, found = Counter[str](), Counter[str](), Counter[str]()
    missed: list[str] = []
    wrong: list[str] = []
    for text, span in made:
        seen = spans(text)
        found.update(one.kind for one in seen)
        wrong += [f"{one.kind}: {text[one.start : one.end]}" for one in seen if one != span]
        if span is not None:
            planted[span.kind] += 1
            right[span.kind] += span in seen
            missed += [] if span in seen else [f"{span.kind}: {text[span.start : span.end]}"]
    each = {
        kind: {
            "recall": round(right[kind] / planted[kind], 4),
            "precision": round(right[kind] / max(1, found[kind]), 4),
        }
        for kind in sorted(planted)
    }
    return {
        "texts": len(made),
        "recall": round(right.total() / planted.total(), 4),
        "precision": round(right.total() / found.total(), 4),
        "kinds": each,
        "missed": missed,
        "wrong": wrong,
    }


def cost(texts: Sequence[str], read: Callable[[str], object]) -> float:
    """Milliseconds per 1,000 tokens of reading ``texts``: the best of five passes."""
    tokens = sum(map(len, texts)) / _CHARS_PER_TOKEN
    times: list[float] = []
    for _ in range(5):
        began = time.process_time()
        for text in texts:
            read(text)
        times.append(time.process_time() - began)
    return round(min(times) * 1e3 / (tokens / 1000), 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--count", type=int, default=2000, help="texts, half of them with look-alikes only")
    parser.add_argument("--json", type=Path, help="write the report there too")


def run(options: argparse.Namespace) -> None:
    made = cases(options.seed, options.count)
    texts = [text for text, _ in made]
    pages = [page.read_text(encoding="utf-8") for page in sorted(_PAGES.glob("*.md"))]
    report = {
        "seed": options.seed,
        **measure(made),
        "ms_per_1000_tokens": {
            "set": cost(texts, spans),
            "set_private": cost(texts, private),
            "pages": cost(pages, spans),
        },
        "spans_in_pages": [f"{one.kind}: {page[one.start : one.end]}" for page in pages for one in spans(page)],
    }
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
