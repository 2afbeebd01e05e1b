"""A million parameters and a thousand clients: the memory of some lanes, not of a thousand copies."""

from __future__ import annotations

from tests.problems import copies_of_a_million


def test_a_thousand_clients_are_not_a_thousand_copies():
    copies, lanes = copies_of_a_million(1000)
    print(f"{copies:.0f} copies' worth of memory, {lanes:.0f} lanes")
    assert lanes <= 20 and copies < 150
