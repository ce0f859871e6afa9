"""Writes ``repairs.jsonl``: small Python projects, each a module with one bug and the tests that show it, one a line.

All of them were written for this tutorial.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ORDER = "The tests of {name}.py fail: python3 -m unittest. Repair the module, and leave its tests as they are."
IMPORTS = "import unittest\n\nfrom {name} import *\n\n\n"
#: module, what it should be, the piece of it that is broken and how, and the assertions of its tests
REPAIRS = (
    (
        "pages",
        "def pages(items, size):\n"
        '    """The items in lists of at most `size`, in their order."""\n'
        "    return [items[start : start + size] for start in range(0, len(items), size)]\n",
        ("range(0, len(items), size)", "range(0, len(items) - 1, size)"),
        ("pages([1, 2, 3], 2) == [[1, 2], [3]]", "pages([], 2) == []", "pages([7], 1) == [[7]]"),
    ),
    (
        "leap",
        "def is_leap(year):\n"
        '    """Whether a year of the Gregorian calendar has 366 days."""\n'
        "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        (" and (year % 100 != 0 or year % 400 == 0)", " and year % 100 != 0"),
        ("is_leap(2024)", "not is_leap(1900)", "is_leap(2000)", "not is_leap(2023)"),
    ),
    (
        "basket",
        "def add(item, basket=None):\n"
        '    """The basket with the item in it; a new one unless one is given."""\n'
        "    basket = [] if basket is None else basket\n"
        "    basket.append(item)\n"
        "    return basket\n",
        (
            "basket=None):\n"
            '    """The basket with the item in it; a new one unless one is given."""\n'
            "    basket = [] if basket is None else basket\n",
            'basket=[]):\n    """The basket with the item in it; a new one unless one is given."""\n',
        ),
        ("add('a') == ['a']", "add('b') == ['b']", "add('c', ['a']) == ['a', 'c']"),
    ),
    (
        "search",
        "def find(numbers, wanted):\n"
        '    """The place of `wanted` in sorted numbers, or -1."""\n'
        "    low, high = 0, len(numbers) - 1\n"
        "    while low <= high:\n"
        "        middle = (low + high) // 2\n"
        "        if numbers[middle] == wanted:\n"
        "            return middle\n"
        "        if numbers[middle] < wanted:\n"
        "            low = middle + 1\n"
        "        else:\n"
        "            high = middle - 1\n"
        "    return -1\n",
        ("while low <= high", "while low < high"),
        ("find([1, 3, 5], 5) == 2", "find([4], 4) == 0", "find([1, 3], 2) == -1", "find([], 1) == -1"),
    ),
    (
        "roman",
        "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100, 'D': 500, 'M': 1000}\n\n\n"
        "def number(numeral):\n"
        '    """The value of a Roman numeral."""\n'
        "    values = [VALUES[letter] for letter in numeral]\n"
        "    smaller = [one < after for one, after in zip(values, values[1:] + [0])]\n"
        "    return sum(-one if less else one for one, less in zip(values, smaller))\n",
        ("one < after", "one <= after"),
        ("number('XIV') == 14", "number('III') == 3", "number('MCMXC') == 1990"),
    ),
    (
        "median",
        "def median(numbers):\n"
        '    """The middle of the numbers, or the mean of the two in the middle."""\n'
        "    ordered = sorted(numbers)\n"
        "    half = len(ordered) // 2\n"
        "    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2\n",
        ("(ordered[half - 1] + ordered[half]) / 2", "(ordered[half] + ordered[half + 1]) / 2"),
        ("median([3, 1, 2]) == 2", "median([1, 2, 3, 4]) == 2.5", "median([1, 2]) == 1.5"),
    ),
    (
        "names",
        "def initials(name):\n"
        '    """The first letters of a name in capitals."""\n'
        "    return ''.join(part[0].upper() for part in name.split())\n",
        ("name.split()", "name.split(' ')"),
        ("initials('ada lovelace') == 'AL'", "initials(' grace  hopper ') == 'GH'", "initials('') == ''"),
    ),
    (
        "flat",
        "def flat(items):\n"
        '    """The items of nested lists, in their order, in one list."""\n'
        "    found = []\n"
        "    for item in items:\n"
        "        if isinstance(item, list):\n"
        "            found.extend(flat(item))\n"
        "        else:\n"
        "            found.append(item)\n"
        "    return found\n",
        ("found.extend(flat(item))", "found.extend(item)"),
        ("flat([1, [2, 3]]) == [1, 2, 3]", "flat([[1, [2]], [[[3]]]]) == [1, 2, 3]", "flat([]) == []"),
    ),
    (
        "words",
        "def count(text):\n"
        '    """How often each word occurs, whatever its case."""\n'
        "    counts = {}\n"
        "    for word in text.lower().split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n"
        "    return counts\n",
        ("counts.get(word, 0) + 1", "counts.get(word, 1) + 1"),
        ("count('a b A') == {'a': 2, 'b': 1}", "count('') == {}", "count('one') == {'one': 1}"),
    ),
    (
        "clock",
        "def told(seconds):\n"
        '    """Seconds as hours:minutes:seconds, such as 1:02:03."""\n'
        "    minutes, rest = divmod(seconds, 60)\n"
        "    hours, minutes = divmod(minutes, 60)\n"
        "    return f'{hours}:{minutes:02}:{rest:02}'\n",
        ("{minutes:02}:{rest:02}", "{minutes}:{rest}"),
        ("told(3723) == '1:02:03'", "told(0) == '0:00:00'", "told(59) == '0:00:59'"),
    ),
    (
        "merged",
        "def merged(one, other):\n"
        '    """Two sorted lists as one that is sorted."""\n'
        "    found, i, j = [], 0, 0\n"
        "    while i < len(one) and j < len(other):\n"
        "        if one[i] <= other[j]:\n"
        "            found.append(one[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            found.append(other[j])\n"
        "            j += 1\n"
        "    return found + one[i:] + other[j:]\n",
        ("found + one[i:] + other[j:]", "found + one[i:]"),
        ("merged([1, 4], [2, 3]) == [1, 2, 3, 4]", "merged([], [1]) == [1]", "merged([1], [2, 5]) == [1, 2, 5]"),
    ),
    (
        "settings",
        "def read(text):\n"
        '    """The settings of lines such as `name = value`; empty lines and comments (#) are left out."""\n'
        "    lines = [line.strip() for line in text.splitlines()]\n"
        "    pairs = [line.split('=', 1) for line in lines if line and not line.startswith('#')]\n"
        "    return {name.strip(): value.strip() for name, value in pairs}\n",
        ("line.split('=', 1)", "line.split('=')"),
        ("read('a = 1\\n# b = 2\\n\\n') == {'a': '1'}", "read('url = x?y=z') == {'url': 'x?y=z'}", "read('') == {}"),
    ),
)


def rows() -> list[dict[str, Any]]:
    """The lines of the file; ``right`` is the module as it should be, which no agent sees."""
    found: list[dict[str, Any]] = []
    for name, right, (piece, broken), asserted in REPAIRS:
        lines = "".join(f"        self.assertTrue({one})\n" for one in asserted)
        tests = f"{IMPORTS.format(name=name)}class Tests(unittest.TestCase):\n    def test(self):\n{lines}"
        found.append(
            {
                "task_id": name,
                "prompt": ORDER.format(name=name),
                "module": right.replace(piece, broken),
                "tests": tests,
                "right": right,
            }
        )
    return found


def main() -> None:
    (HERE / "repairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
