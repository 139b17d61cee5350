"""A definition as a graph: what :class:`GraphOps` sees when a network runs through it once, symbolically."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.model.architecture import (
    Activation,
    Architecture,
    AttentionSpec,
    EncoderSpec,
    NormSpec,
    RopeSpec,
)
from headrace.model.network import run
from headrace.model.ops import Index, Shard

Kind = Literal[
    "embed",
    "norm",
    "head_norm",
    "linear",
    "rope",
    "attention",
    "glu",
    "activate",
    "add",
    "logit_rows",
    "softcap",
    "sample",
    "pool",
]


@dataclass(slots=True, eq=False)
class Node:
    """One operation: its inputs, the weight it names, and everything else in ``attrs``."""

    kind: Kind
    inputs: tuple[Node, ...] = ()
    name: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)
    consumers: list[Node] = field(default_factory=list)


class GraphOps:
    """Implements headrace.model.ops.Ops[Node] by writing everything down in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _node(self, kind: Kind, *inputs: Node, name: str = "", **attrs: Any) -> Node:
        node = Node(kind, inputs, name, attrs)
        for source in inputs:
            source.consumers.append(node)
        self.nodes.append(node)
        return node

    def embed(self, name: str, *, scale: float, by: Index = "token") -> Node:
        return self._node("embed", name=name, scale=scale, by=by)

    def norm(self, x: Node, name: str, spec: NormSpec) -> Node:
        return self._node("norm", x, name=name, spec=spec)

    def head_norm(self, x: Node, name: str, spec: NormSpec, *, heads: int) -> Node:
        return self._node("head_norm", x, name=name, spec=spec, heads=heads)

    def linear(self, x: Node, name: str, *, bias: bool = False, shard: Shard = "none") -> Node:
        return self._node("linear", x, name=name, bias=bias, shard=shard)

    def rope(self, x: Node, spec: RopeSpec, *, heads: int) -> Node:
        return self._node("rope", x, spec=spec, heads=heads)

    def attention(self, q: Node, k: Node, v: Node, spec: AttentionSpec, *, layer: int) -> Node:
        return self._node("attention", q, k, v, spec=spec, layer=layer)

    def glu(self, gate: Node, up: Node, activation: Activation) -> Node:
        return self._node("glu", gate, up, activation=activation)

    def activate(self, x: Node, activation: Activation) -> Node:
        return self._node("activate", x, activation=activation)

    def add(self, x: Node, y: Node) -> Node:
        return self._node("add", x, y)

    def logit_rows(self, x: Node) -> Node:
        return self._node("logit_rows", x)

    def softcap(self, x: Node, cap: float) -> Node:
        return self._node("softcap", x, cap=cap)

    def sample(self, logits: Node) -> None:
        self._node("sample", logits)

    def pool(self, x: Node, spec: EncoderSpec) -> None:
        self._node("pool", x, spec=spec)


def network_graph(arch: Architecture) -> list[Node]:
    """The nodes of one step, in execution order."""
    ops = GraphOps()
    run(ops, arch)
    return ops.nodes
