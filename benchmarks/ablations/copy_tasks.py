"""What speculation is measured on: answers that repeat much of their prompt, and some that repeat nothing.

The small default model does not do all that it is asked: it lists a whole class where signatures are wanted,
and quotes methods that nobody asked for. But each answer is of the kind that the task's name says.
"""

from __future__ import annotations

from dataclasses import dataclass

LEDGER = """The harbour master keeps a ledger of every vessel that enters the bay. Each entry names
the ship, its captain, the port it sailed from and the cargo it carries. On the third of May the
brig Adelaide arrived from Lisbon with cork, salt and oranges under Captain Moreira. On the fifth
the schooner Wren came in from Bergen with dried cod and timber under Captain Solheim. On the ninth
the barque Constance put in for repairs after losing her foremast in a gale off Ushant. Her cargo of
Baltic hemp was dry, and she sailed again on the fourteenth."""

_FIRST = '''class Account:
    """Money that belongs to one customer."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.entries = []

    def deposit(self, amount):
        """Put money into the account."""
        if amount <= 0:
            raise ValueError("a deposit must be positive")
        self.balance += amount
        self.entries.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        """Take money out of the account."""
        if amount <= 0:
            raise ValueError("a withdrawal must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance -= amount
        self.entries.append(("withdraw", amount))
        return self.balance

    def transfer(self, other, amount):
        """Move money to another account."""
        self.withdraw(amount)
        other.deposit(amount)
        self.entries.append(("transfer", amount))
        return self.balance
'''

_MORE = '''
    def charge_fee(self, fee):
        """Take a fee, even if the balance gets negative."""
        self.balance -= fee
        self.entries.append(("fee", fee))
        return self.balance

    def pay_interest(self, rate):
        """Add a year's interest."""
        if rate < 0:
            raise ValueError("the rate must not be negative")
        interest = self.balance * rate / 100
        self.balance += interest
        self.entries.append(("interest", interest))
        return interest

    def largest_entry(self):
        """The entry that moved most money, or None."""
        if not self.entries:
            return None
        return max(self.entries, key=lambda entry: entry[1])
'''

_LAST = '''
    def statement(self):
        """All entries, one a line."""
        lines = [f"Account of {self.owner}"]
        for kind, amount in self.entries:
            lines.append(f"{kind:10} {amount:8.2f}")
        lines.append(f"Balance: {self.balance:.2f}")
        return "\\n".join(lines)
'''


SHORT, LONG = _FIRST + _LAST, _FIRST + _MORE + _LAST


@dataclass(frozen=True)
class Task:
    """A chat's prompt, and at most so many tokens of an answer. ``to_the_end``: also beyond its own end."""

    name: str
    prompt: str
    max_tokens: int
    to_the_end: bool = False


TASKS = (
    Task("copy a text", f"Repeat the following text exactly, word for word:\n\n{LEDGER}", 160, True),
    Task("copy code", f"{LONG}\n\nList the signature and the docstring of each method of this class.", 450),
    Task(
        "edit code",
        "Rename the method `withdraw` to `take_out` in this code. Answer with the whole code.\n\n"
        f"```python\n{SHORT}```",
        600,
    ),
    Task(
        "extract code",
        f"```python\n{LONG}```\n\nQuote the methods `deposit`, `withdraw` and `statement` of this class, "
        "each with its code, and say what it does.",
        600,
    ),
    Task("a story", "Write a story about a lighthouse keeper who learns to cook.", 160, True),
    Task("an explanation", "Explain how rivers shape the land over thousands of years.", 160, True),
)
