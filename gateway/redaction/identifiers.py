"""What identifies people and machines by its form: e-mail and IP addresses, cards, bank accounts, phones; and ``Span``,
a part of a text that is private.

Invariant: a found IP address is valid and names a machine: no version, time, netmask, loopback or unspecified address.
A found card has a length of its issuer and the right check digit (Luhn), a found IBAN the length of its country and the
right checksum (ISO 7064, mod 97-10). A phone has the form of a number that is written to be called, or a word before it
says that it is one; no date, amount or number that a word before it calls an order, a ticket, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network
from typing import NamedTuple


class Span(NamedTuple):
    """The characters ``start`` to ``end`` (exclusive) of a text."""

    kind: str
    start: int
    end: int


_WORD = re.compile(r"[^\W\d_]+\.?")
_LOOK_BACK, _MOST_WORDS, _LONGEST_ABBREVIATION = 40, 4, 4


def words_of(text: str) -> frozenset[str]:
    """The words of ``text``, for :func:`said_before`."""
    return frozenset(text.split())


def said_before(text: str, at: int, words: Set[str], fillers: Set[str]) -> bool:
    """Whether one of ``words`` stands before ``at``, in the same sentence and with nothing but ``fillers`` between:
    *order* in ``order no. 12345``. All are in lower case."""
    begin = max(text.rfind("\n", max(0, at - _LOOK_BACK), at) + 1, at - _LOOK_BACK)
    for word in reversed(_WORD.findall(text, begin, at)[-_MOST_WORDS:]):
        plain = word.rstrip(".").lower()
        if plain != word.lower() and len(plain) > _LONGEST_ABBREVIATION:
            return False
        if plain in words:
            return True
        if plain not in fillers:
            return False
    return False


# --------------------------------------------------------------------- addresses

#: RFC 5321, 4.5.3.1.
_LONGEST_LOCAL = 64
_LOCAL_MARKS = frozenset("._%+-'")
#: No more of it: neither a label that goes on, nor a call (``W@x.mean()``), nor a path (``git@host.org:owner``).
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w(]|-\w|\.\w|:[\w~/])")
#: Ends of file names that are no top-level domains: ``icon@2x.png``.
_FILES = frozenset({"png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "ts", "html", "json", "txt", "pdf"})

#: From its first point on: there are fewer of them than digits.
_IPV4 = re.compile(r"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?![\w%]|\.\w|[-+][A-Za-z])")
#: Right before a version or the name of a file.
_BEFORE_VERSION = re.compile(r"(?:[\w.]|[A-Za-z_][-/]|[=<>~^!]=\s?|[<>~^]\s?|§\s?)\Z")
_VERSION_WORDS = words_of(
    "version versions ver release releases released build firmware driver revision rev section sections chapter clause "
    "table figure oid bios patch upgrade upgraded downgrade downgraded update updated kernel"
)
_VERSION_FILLERS = words_of("to from number is no of")
_DIGITS = frozenset("0123456789")
_IPV6 = re.compile(r":[0-9A-Fa-f]{0,4}:")
_IPV6_MARKS = frozenset("0123456789abcdefABCDEF:.")
_LONGEST_IPV6 = 45
_IPV6_STRETCH = re.compile(r"[0-9A-Fa-f:.]++")
#: Global unicast, unique local, link-local, mapped IPv4, NAT64; the rest of the space is not assigned.
_ASSIGNED = [IPv6Network(net) for net in ("2000::/3", "fc00::/7", "fe80::/10", "::ffff:0:0/96", "64:ff9b::/96")]


def emails(text: str) -> Iterator[Span]:
    """E-mail addresses; no user of an address such as ``https://user@host.org`` or ``git@host.org:owner/name``."""
    at = text.find("@")
    while at >= 0:
        start, first = at, max(0, at - _LONGEST_LOCAL)
        while start > first and (text[start - 1].isalnum() or text[start - 1] in _LOCAL_MARKS):
            start -= 1
        while start < at and text[start] in ".-'%":
            start += 1
        domain = _DOMAIN.match(text, at + 1) if start < at and text[at - 1] != "." else None
        if (
            domain is not None
            and domain[0].rpartition(".")[2].lower() not in _FILES
            and not text.endswith("://", 0, start)
        ):
            yield Span("email", start, domain.end())
            at = domain.end() - 1
        at = text.find("@", at + 1)


def ip_addresses(text: str) -> Iterator[Span]:
    """IPv4 and IPv6 addresses of machines."""
    for match in _IPV4.finditer(text):
        at = match.start()
        while at > match.start() - 4 and text[at - 1 : at] in _DIGITS:
            at -= 1
        if not (
            _BEFORE_VERSION.search(text, max(0, at - 3), at)
            or said_before(text, at, _VERSION_WORDS, _VERSION_FILLERS)
            or not _is_ipv4(text[at : match.end()])
        ):
            yield Span("ip", at, match.end())
    end = 0
    for match in _IPV6.finditer(text):
        if match.start() < end:
            continue
        start = match.start()
        while start > end and text[start - 1] in _IPV6_MARKS:
            start -= 1
        stretch = _IPV6_STRETCH.match(text, start)
        assert stretch is not None, "a colon is one of its marks"
        end = last = stretch.end()
        while text[last - 1] == "." or (text[last - 1] == ":" and text[last - 2] != ":"):
            last -= 1
        alone = not (text[start - 1 : start].isalnum() or text[start - 1 : start] == "_")
        alone = alone and not (text[last : last + 1].isalnum() or text[last : last + 1] == "_")
        # what is longer is a dump, a fingerprint, or a list of MAC addresses
        if alone and last - start <= _LONGEST_IPV6 and _is_ipv6(text[start:last]):
            yield Span("ip", start, last)


def _is_ipv4(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except AddressValueError:
        return False
    first = address.packed[0]
    return first not in (0, 127) and first < 224


def _is_ipv6(text: str) -> bool:
    # words of hexadecimal letters make paths of Rust and C++: `face::add`
    if not any(mark.isdigit() for mark in text):
        return False
    try:
        address = IPv6Address(text)
    except AddressValueError:
        return False
    return any(address in net for net in _ASSIGNED)


# --------------------------------------------------------------------- numbers

#: Digits with what may stand between them, seven or more: a text without any is left at once.
_STRETCH = re.compile(r"[0-9](?:[ ().\-/\u00a0\u2011]{0,3}[0-9]){6,}+")
_SHORTEST_CARD, _SHORTEST_NATIONAL = 13, 9

#: Length of an IBAN by country: the registry of SWIFT, release 99.
_IBAN_LENGTHS = {
    entry[:2]: int(entry[2:])
    for entry in words_of(
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 "
        "ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 "
        "LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 "
        "PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 "
        "YE30"
    )
}

#: Issuers by the first digits, and the lengths of their cards.
_CARDS = [
    (re.compile(r"4"), {13, 16, 19}),  # Visa
    (re.compile(r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720"), {16}),  # Mastercard
    (re.compile(r"3[47]"), {15}),  # American Express
    (re.compile(r"6011|64[4-9]|65"), {16, 19}),  # Discover
    (re.compile(r"30[0-5]|3095|36|38|39"), {14, 16, 19}),  # Diners Club
    (re.compile(r"352[89]|35[3-8]"), {16, 19}),  # JCB
    (re.compile(r"62"), {16, 17, 18, 19}),  # UnionPay
    (re.compile(r"5018|5020|5038|5893|6304|6759|676[1-3]"), {16, 18, 19}),  # Maestro
]
_CARD = re.compile(
    r"(?<![\w.])(?<![0-9]-)[2-6](?:[0-9]{12,18}|[0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{3})?"
    r"|[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5})(?!\w|[.-][0-9])"
)
#: The check digits of an IBAN behind two letters, and what follows.
_IBAN = re.compile(r"[0-9](?<=[A-Za-z]{2}[0-9])[0-9][ \u00a0-]?[0-9A-Za-z]{4}")

_SEPARATOR = r"(?: ?[().\-/] ?|[ \u00a0\u2011]){0,2}"
#: Forms that say themselves that they are phones.
_INTERNATIONAL = re.compile(rf"(?<![\w+])(?<![0-9] )(?:\+|00)\(?[1-9](?:{_SEPARATOR}[0-9]){{7,14}}+(?!\w)")
_NORTH_AMERICAN = re.compile(
    r"(?<![\w+./-])(?<![0-9] )(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .-])[2-9][0-9]{2}[ .-][0-9]{4}"
    r"(?!\w|[.-][0-9])"
)
#: Behind the trunk prefix 0.
_NATIONAL = re.compile(
    rf"(?<![\w+./-])(?<![0-9] )\(?0[1-9](?:{_SEPARATOR}[0-9]){{7,10}}(?!\w|[.-][0-9])",
)
_WITH_AREA = re.compile(r"(?<!\w)\([1-9][0-9]{1,3}\) ?[0-9]{3,5}[ -][0-9]{3,4}(?!\w|[.-][0-9])")
#: Any number behind a word that says that it is a phone.
_SAID = re.compile(rf"\(?[0-9](?:{_SEPARATOR}[0-9]){{6,14}}(?!\w)")
_PHONE_WORDS = words_of(
    "phone phones telephone tel telefon telefonnummer téléphone teléfono telefone telefono cellulare mobile mobil "
    "mobiel mobilnummer cell handy handynummer fax whatsapp signal sms call calling dial ring text hotline rufnummer "
    "anrufen"
)
_PHONE_FILLERS = words_of("me us him her them back number no nr is at on under unter to via")
_OTHER_WORDS = words_of(
    "order orders ticket tickets invoice invoices case cases ref reference id ids uid serial sku part parts item items "
    "isbn issn tracking version versions build account accounts customer batch lot model issue issues transaction "
    "confirmation booking reservation policy patent doi commit page pages line lines port total amount size bytes "
    "timestamp epoch contract receipt shipment parcel article product barcode ean upc job run seed auftrag rechnung "
    "bestellnummer rechnungsnummer kundennummer auftragsnummer artikelnummer"
)
_OTHER_FILLERS = words_of("number numbers no nr num id ids code is was of")
_DATE = re.compile(
    r"(?<![0-9])(?:[0-3]?[0-9]([./-])[0-3]?[0-9]\1(?:19|20)[0-9]{2}|(?:19|20)[0-9]{2}([./-])[01][0-9]\2[0-3][0-9])(?![0-9])"
)
_DIGIT = re.compile(r"[0-9]")
_PAIRS = re.compile(r"[0-9]{2}(?:[ .-][0-9]{2})+")
_DECIMAL = re.compile(r"[+]?[0-9]+\.[0-9]+")


def numbers(text: str) -> Iterator[Span]:
    """Cards, IBANs and phones."""
    for stretch in _STRETCH.finditer(text):
        digits = _digits(stretch[0])
        # a plus or parenthesis before it, and what must not follow it
        start, end = max(0, stretch.start() - 2), min(len(text), stretch.end() + 2)
        if digits >= _SHORTEST_CARD:
            for card in _CARD.finditer(text, start, end):
                if _is_card(card[0]):
                    yield Span("card", *card.span())
        yield from _phones(text, start, stretch.start(), end, digits)
    for match in _IBAN.finditer(text):
        if (iban_end := _iban_end(text, match.start() - 2)) is not None:
            yield Span("iban", match.start() - 2, iban_end)


def _phones(text: str, start: int, first: int, end: int, digits: int) -> Iterator[Span]:
    """Those among the characters ``start`` to ``end``, of which that at ``first`` is the first digit."""
    opens = "(" in text[start:end]
    forms = [_INTERNATIONAL] if "+" in text[start:first] or "00" in text[first:end] else []
    forms += [_NORTH_AMERICAN, _NATIONAL] if digits >= _SHORTEST_NATIONAL else []
    forms += [_WITH_AREA] if opens else []
    for form in forms:
        for phone in form.finditer(text, start, end):
            if (
                _is_written_as_phone(phone[0])
                and text[(at := phone.start()) - 1 : at] != "#"
                and not said_before(text, at, _OTHER_WORDS, _OTHER_FILLERS)
            ):
                yield _phone(phone)
    if said_before(text, first, _PHONE_WORDS, _PHONE_FILLERS):
        begins = first - (text[first - 1 : first] == "(")
        phone = _SAID.match(text, begins, end)
        if phone is not None and not _DATE.search(phone[0]) and not text[begins - 1 : begins].isalnum():
            yield _phone(phone)


def _digits(text: str) -> int:
    return len(_DIGIT.findall(text))


def _phone(match: re.Match[str]) -> Span:
    """Without a parenthesis that is open at its end."""
    number = match[0]
    return Span("phone", match.start() + (number[0] == "(" and ")" not in number), match.end())


def _is_written_as_phone(text: str) -> bool:
    """Whether it is neither a date nor a plain number."""
    if _DATE.search(text) or _DECIMAL.fullmatch(text):
        return False
    digits = _digits(text)
    if text.startswith("+") or text.startswith("(+"):
        return digits < len(text) - 1 or digits >= 10
    # France writes five pairs; a longer row of them is something else
    if _PAIRS.fullmatch(text) and digits != 10:
        return False
    return digits < len(text) and digits >= 9


def _is_card(text: str) -> bool:
    digits = [int(mark) for mark in text if mark.isdigit()]
    if sum(digits[-1::-2]) % 10 != -sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]) % 10:
        return False
    return any(
        issuer.match(text.replace(" ", "").replace("-", "")) and len(digits) in sizes for issuer, sizes in _CARDS
    )


def _iban_end(text: str, start: int) -> int | None:
    """Where the IBAN at ``start`` ends, if there is one; blanks may part it into groups of four."""
    country, before = text[start : start + 2].upper(), text[start - 1 : start] if start else ""
    if country not in _IBAN_LENGTHS or before.isalnum() or before == "_":
        return None
    length, separator = _IBAN_LENGTHS[country], text[start + 4]
    if separator.isalnum():
        end = start + length
        marks = text[start:end]
    else:
        end = start + length + (length - 1) // 4
        marks = text[start:end].replace(separator, "")
    if len(marks) != length or not (marks.isascii() and marks.isalnum()) or text[end : end + 1].isalnum():
        return None
    turned = marks[4:] + marks[:4]
    return end if int("".join(str(int(mark, 36)) for mark in turned)) % 97 == 1 else None
