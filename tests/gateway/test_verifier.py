"""What tells two similar questions apart: each pair, and why it is refused."""

from __future__ import annotations

import pytest

from headrace.gateway.verifier import agreement, loose, read, refusal

REFUSED = [
    ("negation", "Is it safe to swim here?", "Is it not safe to swim here?"),
    ("negation", "Tea with milk", "Tea without milk"),
    ("number", "How do I bake for 4 people?", "How do I bake for six people?"),
    ("number", "Convert 1,000 euros", "Convert 1,001 euros"),
    ("unit", "What is 30 degrees Celsius?", "What is 30 degrees Fahrenheit?"),
    ("unit", "Run 5km", "Run 5 miles"),
    ("time", "Is the bank open in summer?", "Is the bank open in winter?"),
    ("time", "Can I pay before the course?", "Can I pay after the course?"),
    ("name", "Who is the king of Norway?", "Who is the king of Sweden?"),
    ("opposite", "How do I install the driver?", "How do I uninstall the driver?"),
    (
        "opposite",
        "Advantages of solar panels and their benefits",
        "Advantages of solar panels and their drawbacks",
    ),
    ("roles", "How do I move photos from phone to laptop?", "How do I move photos from laptop to phone?"),
    ("roles", "Who did Napoleon defeat?", "Who defeated Napoleon?"),
    ("roles", "What is 20 as a percentage of 50?", "What is 50 as a percentage of 20?"),
    ("question", "Why does yeast rise?", "When does yeast rise?"),
    ("question", "How old is the tower?", "How far is the tower?"),
    ("scope", "Do all birds fly?", "Do birds fly?"),
    ("name", "Is the bank open on Monday?", "Is the bank open on Tuesday?"),
    ("opposite", "At least how many votes are needed?", "At most how many votes are needed?"),
    ("scope", "Can my boss call my wife?", "Can my boss call me?"),
    ("person", "Where is my order?", "Where is her order?"),
    ("question", "Who is the director?", "Was she the director?"),
    ("symbol", "How do I learn C?", "How do I learn C++?"),
    ("language", "What does gift mean?", "Was ist ein Gift und wie wirkt es?"),
    ("language", "Wie alt ist die Stadt?", "Wie alt ist eine Stadt?"),
]
PASSED = [
    ("How do I reset my router?", "How can I reset my router?"),
    ("What is the tallest tower in Dubai?", "what's dubai's tallest tower"),
    ("How many metres are in 3 feet?", "3 feet is how many meters?"),
    ("Should I rent or buy?", "Should I buy or rent?"),
    ("Please tell me how to boil rice.", "How do I boil rice?"),
    ("Is it legal to fish here?", "Am I allowed to fish here?"),
    ("Wie alt ist die Stadt?", "wie alt ist die stadt"),
]


@pytest.mark.parametrize(("why", "one", "other"), REFUSED)
def test_it_refuses(why: str, one: str, other: str) -> None:
    assert (refusal(read(one), read(other)), refusal(read(other), read(one))) == (why, why)


@pytest.mark.parametrize(("one", "other"), PASSED)
def test_it_passes(one: str, other: str) -> None:
    assert (refusal(read(one), read(other)), loose(read(one), read(other))) == (None, False)


def test_what_it_cannot_judge_is_loose() -> None:
    one, other = read("How do I repair a bike?"), read("How do I repair a bike tyre?")
    assert (refusal(one, other), loose(one, other)) == (None, True)


@pytest.mark.parametrize(
    "text", ["", " ", "?", "’", "\ud800", "İ" * 900, "a " * 5000, "((((", "1,,2 3.4.5.6"]
)
def test_it_reads_anything(text: str) -> None:
    assert refusal(read(text), read(text)) is None


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        ("Paris.", "The capital of France is Paris.", True),
        ("It is 5.", "The answer to this question is 5.", True),
        ("Lyon is it.", "Paris", None),
        ("Yes.", "No.", False),
        ("In 1989", "It fell in 1990.", False),
        ("It is in Paris.", "It is in Lyon.", False),
    ],
)
def test_two_answers_are_compared(one: str, other: str, agrees: bool | None) -> None:
    asked = read("What is the capital of France?")
    assert agreement(read(one), read(other), asked, asked) == agrees
