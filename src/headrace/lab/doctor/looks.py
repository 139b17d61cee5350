"""All looks, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.lab.doctor import compatibility, containers, links, processor, storage
from headrace.lab.doctor.check import Check


def checks(network: str | None = None) -> Iterator[Check]:
    """All checks, one by one; one that fails itself is a broken line, not a crash.

    ``network``: an address whose download speed is to be measured.
    """
    group = containers.own_group()
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("CPU", processor.cpu),
        ("kernels", processor.kernels),
        ("precisions", compatibility.precisions),
        ("cores", lambda: processor.cores(group)),
        ("throttling", lambda: containers.throttling(group)),
        ("steal", containers.steal),
        ("frequency", processor.frequency),
        ("NUMA", processor.numa),
        ("memory", lambda: containers.memory(group)),
        ("huge pages", storage.huge_pages),
        ("cache", storage.cache),
        ("disk", storage.disk),
        ("Python", compatibility.python),
        ("compiler", compatibility.compiler),
        *((f"extra {name}", compatibility.extra_check(name)) for name in compatibility.EXTRAS),
        ("torch", compatibility.torch_and_triton),
        ("GPU", compatibility.gpu),
        ("GPU links", links.between_gpus),
        ("nodes", links.between_nodes),
    ]
    if network is not None:
        looks.append(("network", lambda: storage.network(network)))
    for name, look in looks:
        try:
            yield look()
        except Exception as error:
            yield Check(name, "broken", f"could not be checked: {error}", "please report this")
