"""Lowers a definition's graph to native instructions.

Fusions, each a match on the graph and none on a model: linears that read the same value become one matrix
when their packed tiles lie side by side; quantisation joins the norm or gated unit before it; q/k norms,
rotation and the KV write are one instruction; a branch adds itself to the residual stream.
Scratch is one buffer per role, reused by all layers: instructions are separated by barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu.graph import Node
from headrace.backend.cpu.instruction import INSTRUCTION, OPERAND, WEIGHT_FORMAT, Base, Op
from headrace.backend.cpu.packing import LANES, WeightFormat, padded
from headrace.backend.cpu.weights_file import PackedTensor, order_name
from headrace.backend.kv_format import kv_layer_bytes
from headrace.backend.runner import RunnerSettings
from headrace.errors import ConfigError, ModelFormatError
from headrace.model.architecture import Architecture, AttentionSpec, RopeSpec

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@dataclass(slots=True)
class Place:
    """Where a value lies in scratch: buffer, floats from the row's start, width in floats."""

    buffer: str
    column: int
    width: int


@dataclass(slots=True)
class Buffer:
    """``rows`` x ``row_bytes`` of scratch; offsets are known only when every buffer's size is."""

    rows: int
    row_bytes: int
    offset: int = 0


Row = dict[str, Any]
"""An instruction while it is recorded, by field: writing into a numpy array takes ten times as long."""

_NOWHERE: tuple[int, int, int] = (Base.ABSENT, 0, 0)
_OPERANDS = tuple(name for name in INSTRUCTION.names or () if INSTRUCTION[name] == OPERAND)
_EMPTY: Row = {
    **dict.fromkeys(INSTRUCTION.names or (), 0),
    **dict.fromkeys(_OPERANDS, _NOWHERE),
    "format": (0,) * len(WEIGHT_FORMAT.names or ()),
    "barrier": 1,
}


@dataclass(slots=True)
class Recording:
    """A program ready for the native side. ``constants`` go into scratch before the first step."""

    instructions: NDArray[np.void]
    scratch_bytes: int
    constants: list[tuple[int, NDArray[np.float64]]]
    output_offset: int  # of the logits, or an encoder's vectors
    output_stride: int


class Recorder:
    """Walks the graph once, in order. Use :func:`record`."""

    def __init__(
        self,
        arch: Architecture,
        tensors: dict[str, PackedTensor],
        settings: RunnerSettings,
        quant_row_bytes: Callable[[int], int],
    ) -> None:
        self.arch, self.tensors, self.settings = arch, tensors, settings
        self.quant_row_bytes = quant_row_bytes
        self.out: list[Row] = []
        self.buffers: dict[str, Buffer] = {}
        self.pending: list[tuple[Row, str, str, int]] = []  # instruction, operand, buffer, bytes
        self.places: dict[int, Place] = {}
        self.quantised: dict[tuple[int, int | None], str] = {}  # node, order -> buffer of its quantised form
        self.angles: dict[RopeSpec, str] = {}
        self.output = ""  # the buffer that the program ends in

    # -- buffers and operands ---------------------------------------------------------------------------

    def buffer(self, name: str, row_bytes: int, *, logit_rows: bool = False) -> None:
        """Make the named buffer at least this wide."""
        rows = self.settings.max_logit_rows if logit_rows else self.settings.max_batch_tokens
        have = self.buffers.setdefault(name, Buffer(rows, 0))
        have.row_bytes = max(have.row_bytes, -(-row_bytes // 64) * 64)

    def emit(self, op: Op, *, logit_rows: bool = False, **fields: Any) -> Row:
        """Append an instruction; fields not named are zero, operands absent."""
        row = {**_EMPTY, "op": op, "logit_rows": logit_rows, **fields}
        self.out.append(row)
        return row

    def scratch(self, row: Row, operand: str, buffer: str, column: int = 0) -> None:
        """Point an operand at a buffer, ``column`` floats into each row; resolved when sizes are final."""
        self.pending.append((row, operand, buffer, 4 * column))

    def weight(self, row: Row, operand: str, name: str) -> PackedTensor:
        """Point an operand at a packed tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(f"the checkpoint has no tensor {name}")
        row[operand] = (Base.WEIGHTS, 0, tensor.offset)
        return tensor

    def matrix(self, node: Node) -> PackedTensor:
        """The packed weight a linear or embed node names."""
        tensor = self.tensors.get(f"{node.name}.weight")
        if tensor is None:
            raise ModelFormatError(f"the checkpoint has no tensor {node.name}.weight")
        return tensor

    # -- lowering ------------------------------------------------------------------------------------------

    def lower(self, node: Node) -> None:
        """Emit what one node needs; nodes that are part of a later instruction emit nothing here."""
        if id(node) in self.places:  # lowered together with a sibling, or folded into a producer
            return
        method = getattr(self, f"_{node.kind}")
        method(node)

    def _embed(self, node: Node) -> None:
        width = self.arch.hidden_size
        self.buffer("residual", 4 * width)
        row = self.emit(Op.EMBED, i0=width, i1=padded(width), f0=node.attrs["scale"])
        tensor = self.weight(row, "weight", f"{node.name}.weight")
        self._set_format(row, tensor.format)
        row["i1"] = width if tensor.format.dense else padded(width)
        row["i2"] = node.attrs["by"] == "position"
        if row["i2"] and tensor.n < self.settings.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.settings.max_model_len}, but the model has only {tensor.n} positions"
            )
        if self._joins_residual(node):
            row["i3"] = 1
            self._into_residual(row, node)
            return
        self.scratch(row, "output", "residual")
        self.places[id(node)] = Place("residual", 0, width)

    def _norm(self, node: Node) -> None:
        (source,) = node.inputs
        spec = node.attrs["spec"]
        place, gathers = self.places[id(source)], source.kind == "logit_rows"
        row = self.emit(Op.NORM, logit_rows=gathers, i0=place.width, f0=spec.eps)
        row["i1"], row["i2"] = spec.kind == "layer", gathers
        self.weight(row, "weight", f"{node.name}.weight")
        if spec.kind == "layer":
            self.weight(row, "weight2", f"{node.name}.bias")
        self.scratch(row, "input", place.buffer, place.column)
        if self._joins_residual(node):
            row["i3"] = 1
            self._into_residual(row, node)
            return
        buffer = "normed_rows" if gathers else "normed"
        if self._replaces_residual(node):
            buffer = "residual"
        self.buffer(buffer, 4 * place.width, logit_rows=gathers)
        self.scratch(row, "output", buffer)
        self.places[id(node)] = Place(buffer, 0, place.width)
        self._quantise_within(row, node, gathers)

    def _linear(self, node: Node) -> None:
        source = node.inputs[0]
        siblings = [n for n in source.consumers if n.kind == "linear"]
        logit_rows = node.attrs["shard"] == "vocab"
        buffer = "logits" if logit_rows else _role(node)
        columns = [0]
        for sibling in siblings:
            columns.append(columns[-1] + -(-self.matrix(sibling).n // LANES) * LANES)
        joins = len(siblings) == 1 and self._joins_residual(node)
        if not joins:
            self.buffer(buffer, 4 * columns[-1], logit_rows=logit_rows)
        runs = self._runs(siblings)
        inputs = [self._matrix_input(siblings[run[0]], logit_rows) for run in runs]
        for run, (input_buffer, k) in zip(runs, inputs, strict=True):
            first = siblings[run[0]]
            tensor = self.matrix(first)
            n = sum(self.matrix(siblings[i]).n for i in run)
            row = self.emit(Op.MATMUL, logit_rows=logit_rows, i0=n, i1=k)
            row["barrier"] = run[-1] == len(siblings) - 1
            self.weight(row, "weight", f"{first.name}.weight")
            self._set_format(row, tensor.format)
            if first.attrs["bias"]:
                self.weight(row, "weight2", f"{first.name}.bias")
            self.scratch(row, "input", input_buffer)
            if joins:
                row["i2"] = 1
                self._into_residual(row, node)
                return
            self.scratch(row, "output", buffer, columns[run[0]])
        for sibling, column in zip(siblings, columns, strict=False):
            self.places[id(sibling)] = Place(buffer, column, self.matrix(sibling).n)

    def _matrix_input(self, node: Node, logit_rows: bool) -> tuple[str, int]:
        """The buffer that a linear's matrix reads, made if need be, and how many inputs the matrix has."""
        source, tensor = node.inputs[0], self.matrix(node)
        if tensor.format.dense:
            return self.places[id(source)].buffer, tensor.k
        return self._quantised(source, logit_rows, self._order(node)), padded(tensor.k)

    def _head_norm(self, node: Node) -> None:
        """Folded into the attention that follows; the value stays where it is."""
        self.places[id(node)] = self.places[id(node.inputs[0])]

    _rope = _head_norm
    _logit_rows = _head_norm

    def _attention(self, node: Node) -> None:
        spec: AttentionSpec = node.attrs["spec"]
        layer: int = node.attrs["layer"]
        group = self.arch.layers[layer].kv_group
        members = self.arch.kv_groups[group].layers
        if spec.head_dim % 2:
            raise ModelFormatError(f"head_dim is {spec.head_dim}; the cpu backend needs an even one")
        q, k, v = (self.places[id(n)] for n in node.inputs)
        kv_dtype = self.settings.kv_cache_dtype
        shape: dict[str, Any] = {
            "kv_group": group,
            "kv_offset": members.index(layer) * kv_layer_bytes(spec.kv_heads, spec.head_dim, kv_dtype),
            "i1": kv_dtype == "int8",
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
        }
        rope = self._angles(spec.rope) if spec.rope else None
        row = self.emit(Op.ROPE, f0=spec.scale, **shape)
        row["q_offset"], row["k_offset"], row["v_offset"] = q.column, k.column, v.column
        if spec.rope and rope:
            row["i0"] = spec.rope.dim
            self.scratch(row, "input", rope)
        if spec.qk_norm is not None:
            row["f1"] = spec.qk_norm.eps
            self.weight(row, "weight", f"layers.{layer}.attention.q_norm.weight")
            self.weight(row, "weight2", f"layers.{layer}.attention.k_norm.weight")
        self.scratch(row, "output", q.buffer)

        width = spec.heads * spec.head_dim
        self.buffer("attended", 4 * width)
        if not spec.causal and spec.window is not None:
            raise ValueError("attention over the whole sequence has no window")
        row = self.emit(Op.ATTENTION, window=spec.window or 0, f0=spec.softcap or 0.0, **shape)
        row["i0"] = not spec.causal
        row["q_offset"] = q.column
        self.scratch(row, "input", q.buffer)
        self.scratch(row, "output", "attended")
        self.places[id(node)] = Place("attended", 0, width)

    def _glu(self, node: Node) -> None:
        gate, up = (self.places[id(node.inputs[i])] for i in (0, -1))  # the same one without a gate
        row = self.emit(Op.GLU, i0=gate.width, i1=up.column - gate.column)
        row["i2"] = ACTIVATIONS[node.attrs["activation"]]
        self.buffer("activated", 4 * gate.width)
        self.scratch(row, "input", gate.buffer, gate.column)
        self.scratch(row, "output", "activated")
        self.places[id(node)] = Place("activated", 0, gate.width)
        self._quantise_within(row, node, False)

    _activate = _glu

    def _add(self, node: Node) -> None:
        raise ValueError(
            "only additions to the residual stream, of a value used nowhere else, can be recorded"
        )

    def _softcap(self, node: Node) -> None:
        place = self.places[id(node.inputs[0])]
        row = self.emit(Op.SOFTCAP, logit_rows=True, i0=place.width, f0=node.attrs["cap"])
        self.scratch(row, "output", place.buffer)
        self.places[id(node)] = place

    def _sample(self, node: Node) -> None:
        row = self.emit(Op.SAMPLE, logit_rows=True)
        self.scratch(row, "input", self.places[id(node.inputs[0])].buffer)
        self.output = "logits"

    def _pool(self, node: Node) -> None:
        place, spec = self.places[id(node.inputs[0])], node.attrs["spec"]
        row = self.emit(Op.POOL, i0=place.width, i1=spec.pooling == "mean", i2=spec.normalize)
        self.buffer("pooled", 4 * place.width, logit_rows=True)  # as many rows: one a sequence
        self.scratch(row, "input", place.buffer, place.column)
        self.scratch(row, "output", "pooled")
        self.output = "pooled"

    # -- pieces of the above -------------------------------------------------------------------------------

    def _joins_residual(self, node: Node) -> bool:
        """Whether the node's only use is to be added to the residual stream."""
        if len(node.consumers) != 1 or node.consumers[0].kind != "add":
            return False
        stream = node.consumers[0].inputs[0]
        if stream is node:
            return False
        return self.places[id(stream)].buffer == "residual" and stream.consumers[-1] is node.consumers[0]

    def _replaces_residual(self, node: Node) -> bool:
        """Whether a norm's value is the residual stream from there on: it is written where it was read."""
        (source,) = node.inputs
        if not any(n.kind == "add" and n.inputs[0] is node for n in node.consumers):
            return False
        return self.places[id(source)].buffer == "residual" and source.consumers[-1] is node

    def _into_residual(self, row: Row, node: Node) -> None:
        self.scratch(row, "output", "residual")
        self.places[id(node)] = self.places[id(node.consumers[0])] = Place(
            "residual", 0, self.arch.hidden_size
        )

    def _quantise_within(self, row: Row, node: Node, logit_rows: bool) -> None:
        """Let the instruction that makes a value also quantise it, if a quantised matrix reads it."""
        linears = [n for n in node.consumers if n.kind == "linear" and not self.matrix(n).format.dense]
        if any(self._order(n) is None for n in linears):
            self.scratch(row, "output2", self._quant_buffer(node, logit_rows, None))

    def _order(self, node: Node) -> int | None:
        """Where the order of a linear's columns lies among the weights; None: that of its inputs."""
        tensor = self.tensors.get(order_name(f"{node.name}.weight"))
        return None if tensor is None else tensor.offset

    def _quantised(self, node: Node, logit_rows: bool, order: int | None) -> str:
        """The buffer with the node's quantised form, made now unless its producer already did."""
        if (id(node), order) not in self.quantised:
            place = self.places[id(node)]
            if order is not None:
                place = self._reordered(place, logit_rows, order)
            buffer = self._quant_buffer(node, logit_rows, order)
            row = self.emit(Op.QUANTISE, logit_rows=logit_rows, i0=place.width)
            self.scratch(row, "input", place.buffer, place.column)
            self.scratch(row, "output", buffer)
        return self.quantised[id(node), order]

    def _reordered(self, place: Place, logit_rows: bool, order: int) -> Place:
        """A value with its features in the order of a matrix's columns."""
        buffer = "reordered_rows" if logit_rows else "reordered"
        self.buffer(buffer, 4 * place.width, logit_rows=logit_rows)
        row = self.emit(Op.REORDER, logit_rows=logit_rows, i0=place.width)
        row["weight"] = (Base.WEIGHTS, 0, order)
        self.scratch(row, "input", place.buffer, place.column)
        self.scratch(row, "output", buffer)
        return Place(buffer, 0, place.width)

    def _quant_buffer(self, node: Node, logit_rows: bool, order: int | None) -> str:
        place = self.places[id(node)]
        # One buffer a width: the kernels derive the stride from it.
        buffer = f"{place.buffer}.quantised.{place.width}"
        if order is not None:  # matrices with several orders are multiplied at the same time
            number = sum(made == id(node) for made, _ in self.quantised)
            buffer = f"reordered.{number}.{buffer}"
        self.buffer(buffer, self.quant_row_bytes(padded(place.width)), logit_rows=logit_rows)
        self.quantised[id(node), order] = buffer
        return buffer

    def _angles(self, spec: RopeSpec) -> str:
        """The buffer of this rotation's cosines and sines, computed once per step."""
        if spec not in self.angles:
            buffer = self.angles[spec] = f"angles.{len(self.angles)}"
            self.buffer(buffer, 4 * spec.dim)
            row = self.emit(Op.ANGLES, i0=spec.dim, f0=spec.attention_factor)
            self.scratch(row, "output", buffer)
            self.scratch(row, "weight", f"frequencies.{len(self.angles) - 1}")
        return self.angles[spec]

    def _runs(self, siblings: list[Node]) -> list[list[int]]:
        """Consecutive siblings whose tiles and biases continue each other: each run is one matrix."""
        runs: list[list[int]] = []
        for i, node in enumerate(siblings):
            previous = siblings[runs[-1][-1]] if runs else None
            if previous is not None and self._continues(previous, node):
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def _continues(self, a: Node, b: Node) -> bool:
        x, y = self.matrix(a), self.matrix(b)
        if x.format != y.format or x.k != y.k or x.n % LANES or x.offset + x.size_bytes != y.offset:
            return False
        if self._order(a) != self._order(b):
            return False
        if a.attrs["bias"] != b.attrs["bias"]:
            return False
        if not a.attrs["bias"]:
            return True
        p, q = self.tensors[f"{a.name}.bias"], self.tensors[f"{b.name}.bias"]
        return p.offset + p.size_bytes == q.offset

    def _set_format(self, row: Row, form: WeightFormat) -> None:
        row["format"] = (form.kind, form.scale_bytes, form.offsets, form.group, form.zero_point)

    # -- the end -------------------------------------------------------------------------------------------

    def finish(self) -> Recording:
        """Lay the buffers out and resolve every operand."""
        offset = 0
        constants = []
        for spec, name in self.angles.items():
            values = np.array(spec.inverse_frequencies(), np.float64)
            buffer = self.buffers[name.replace("angles", "frequencies")] = Buffer(1, values.nbytes, offset)
            constants.append((buffer.offset, values))
            offset += -(-values.nbytes // 64) * 64
        for name, buffer in self.buffers.items():
            if name.startswith("frequencies"):
                continue
            buffer.offset = offset
            offset += buffer.rows * buffer.row_bytes
        for row, operand, name, column in self.pending:
            buffer = self.buffers[name]
            row[operand] = (Base.SCRATCH, 0, buffer.offset + column)
            if operand in ("input", "output") and row["op"] != Op.ANGLES:
                row[f"{operand}_stride"] = buffer.row_bytes
        output = self.buffers[self.output]
        instructions = np.array([tuple(row.values()) for row in self.out], INSTRUCTION)
        return Recording(instructions, offset, constants, output.offset, output.row_bytes)


def _role(node: Node) -> str:
    """The scratch buffer of a projection, by what reads it."""
    kinds = {consumer.kind for consumer in node.consumers}
    if kinds & {"rope", "head_norm", "attention"}:
        return "qkv"
    return "gate_up" if kinds & {"glu", "activate"} else "branch"


def record(
    nodes: list[Node],
    arch: Architecture,
    tensors: dict[str, PackedTensor],
    settings: RunnerSettings,
    quant_row_bytes: Callable[[int], int],
) -> Recording:
    """Lower a graph against packed weights. ``quant_row_bytes``: padded width to bytes of a quantised row."""
    recorder = Recorder(arch, tensors, settings, quant_row_bytes)
    for node in nodes:
        recorder.lower(node)
    return recorder.finish()
