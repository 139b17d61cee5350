"""What this machine can do, what is in its way, what that costs and how to better it.

Each look is a small function of the paths it reads, so that a tree of files can stand for a machine.
"""

from headrace.lab.doctor.check import Check
from headrace.lab.doctor.looks import checks

__all__ = ["Check", "checks"]
