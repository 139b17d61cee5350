"""The load: a help desk's chat. One long system prompt for all, then what a user writes, of five kinds.

Every message is made of drawn parts, so that no two users ask the same and only the system prompt is shared.
Two kinds hand the model a text to work on (shorten a ticket, fill in a form): their answers repeat parts of
their prompts, as such answers do.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SYSTEM = """You are the help desk of Millrace Tools, a shop for hand tools and small machines. \
Answer in a friendly tone, in plain words and short sentences, and never longer than needed.
Rules that always hold:
1. Orders can be changed or cancelled until they are packed, which is at noon of the next working day.
2. Parcels arrive within three working days in the country and within seven abroad. Heavy machines come by \
freight, and the carrier telephones to agree on a day.
3. Goods that were not used can be sent back within thirty days. The customer pays for the way back, unless \
the goods were broken or wrong.
4. Tools have a warranty of five years, machines of two, batteries of one. Blades and belts have none.
5. Never promise a refund yourself: say that a colleague will write within one working day.
6. Never ask for passwords or card numbers. If a customer sends one, tell them to change it.
7. When somebody was hurt, give the number of the emergency services first.
If you do not know something, say so, and offer to pass the question on."""

_ITEMS = ("block plane", "bench vice", "cordless drill", "band saw", "chisel set", "wood lathe",
          "torque wrench", "belt sander", "hand saw", "spoke shave", "grinder", "tool chest",
          "marking gauge", "drill press")  # fmt: skip
_FAULTS = ("makes a grinding noise", "arrived with a bent handle", "stops after a minute",
           "does not hold its edge", "smells of burning", "came without its manual", "is a different model",
           "wobbles at speed")  # fmt: skip
_PLACES = ("Leeds", "Turin", "Ghent", "Aarhus", "Porto", "Graz", "Lyon", "Malmö", "Cork", "Basel")
_NAMES = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran", "Hilde", "Ines", "Jonas", "Kofi", "Lena")
_MOODS = ("I am rather annoyed about it.", "No hurry at all.", "I need it for a job on Monday.",
          "It was meant as a present.", "This is the second time.", "Otherwise I like the shop.")  # fmt: skip
_QUESTIONS = ("How long is the warranty of a {item}?", "Can I still cancel order {order}? I bought a {item}.",
              "When will my {item} arrive in {place}?", "Which oil is right for a {item}?",
              "Do you sell spare parts for a {item} that is {years} years old?")  # fmt: skip


def write_chat(path: Path, count: int, seed: int) -> Path:
    """``count`` requests as JSON Lines that ``headrace bench --prompts`` reads."""
    rng = random.Random(seed)
    lines = [json.dumps(_request(rng)) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def text(seed: int) -> str:
    """The system prompt and some messages, to measure how far two models differ on such text."""
    rng = random.Random(seed)
    return "\n\n".join([SYSTEM, *(_request(rng)["messages"][1]["content"] for _ in range(12))])


def _request(rng: random.Random) -> dict[str, Any]:
    kinds = ((_question, 24), (_ticket, 32), (_form, 40), (_reply, 48), (_steps, 48))
    write, answer_tokens = rng.choice(kinds)
    user = write(rng, {
        "item": rng.choice(_ITEMS),
        "fault": rng.choice(_FAULTS),
        "place": rng.choice(_PLACES),
        "name": rng.choice(_NAMES),
        "mood": rng.choice(_MOODS),
        "order": f"{rng.choice('ABCDEFGH')}{rng.randrange(10_000, 100_000)}",
        "day": f"{rng.randrange(1, 29)} {rng.choice(('March', 'May', 'June', 'October'))}",
        "price": str(rng.randrange(20, 900)),
        "years": str(rng.randrange(2, 30)),
    })  # fmt: skip
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": answer_tokens}


def _question(rng: random.Random, part: dict[str, str]) -> str:
    return (
        f"{part['name']} from {part['place']} here, order {part['order']}. {rng.choice(_QUESTIONS)}".format(
            **part
        )
    )


def _message(part: dict[str, str]) -> str:
    return (
        "Hello, my name is {name} and I live in {place}. On {day} I bought a {item} for {price} euros, and "
        "my order has the number {order}. The {item} {fault}, and I do not know what to do. {mood} "
        "Please tell me whether you can repair it or send another one. Kind regards, {name}"
    ).format(**part)


def _ticket(rng: random.Random, part: dict[str, str]) -> str:
    return f"Shorten this message to one sentence and keep the order number:\n\n{_message(part)}"


def _form(rng: random.Random, part: dict[str, str]) -> str:
    fields = "Name, Town, Order, Item, Price and Problem"
    return f"Fill in {fields}, one a line, from this message:\n\n{_message(part)}"


def _reply(rng: random.Random, part: dict[str, str]) -> str:
    return f"Write a reply to this customer:\n\n{_message(part)}"


def _steps(rng: random.Random, part: dict[str, str]) -> str:
    return (
        "My {item}, bought on {day} (order {order}), {fault}. What can I check myself before I send it to "
        "you? {mood}"
    ).format(**part)
