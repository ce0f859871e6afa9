"""E-mail and IP addresses.

Invariant: a found IP address is valid and names a machine: no version, time, netmask, loopback or unspecified address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network

from gateway.redaction.spans import Span, said_before, words_of

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
