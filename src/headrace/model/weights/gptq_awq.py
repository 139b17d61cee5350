"""GPTQ (v1, v2) and AWQ (gemm) checkpoints, in the layouts of AutoGPTQ, GPTQModel and AutoAWQ."""

from __future__ import annotations

import numpy as np

from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.hf_keys import Keys
from headrace.model.weights.int32_codes import WIDTHS, unpack, unpack_awq, words_for
from headrace.model.weights.quantized_linear import (
    FLOATS,
    INTEGERS,
    Module,
    assemble,
    group_count,
    read_groups,
)

_WHOLE_ROW = -1  # a group size
_MAX_GROUP = 1 << 24


class Gptq:
    """``qweight`` and ``qzeros`` in words along input and output, ``scales [groups, out]``, ``g_idx [in]``.

    v1 keeps zero points less one. Bits follow from the shapes, because they may differ between layers.
    """

    ignored: frozenset[str] = frozenset()

    def __init__(self, keys: Keys) -> None:
        self._bits = keys.integer("bits", high=32)
        if self._bits not in WIDTHS:
            raise keys.wrong("bits", f"is {self._bits}, which is not supported; it must be 2, 4 or 8")
        self._group_size = _group_size(keys)
        layout = keys.text("checkpoint_format", "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise keys.wrong(
                "checkpoint_format", f"is {layout!r}, which is not supported; it must be gptq or gptq_v2"
            )
        words = keys.text("pack_dtype", "int32")
        if words != "int32":
            raise keys.wrong("pack_dtype", f"is {words!r}, which is not supported; it must be int32")
        self._less_one = layout == "gptq"

    def check(self, module: Module) -> tuple[str, ...]:
        if "qweight" not in module.parts:
            return ()
        out, inputs = module.shape
        bits = self._bits_of(module)
        module.expect("qweight", ("I32",), (inputs * bits // 32, out))
        groups = self._groups(module)
        module.expect("scales", FLOATS, (groups, out))
        module.expect("qzeros", ("I32",), (groups, words_for(out, bits)))
        if "g_idx" not in module.parts:
            return ("qweight", "qzeros", "scales")
        module.expect("g_idx", INTEGERS, (inputs,))
        return ("qweight", "qzeros", "scales", "g_idx")

    def read(self, module: Module) -> QuantTensor:
        out, inputs = module.shape
        bits = self._bits_of(module)
        codes = unpack(module.read("qweight").T, bits, inputs)
        zero = unpack(module.read("qzeros"), bits, out).T
        if self._less_one:
            if bits == 8 and zero.size and zero.max() == 255:
                raise module.wrong("qzeros", "holds zero points of 256, beyond any code")
            zero = zero + np.uint8(1)
        return assemble(
            module,
            codes,
            module.read("scales").T,
            bits=bits,
            zero=zero,
            group_size=_inputs_of_group(self._group_size, inputs),
            groups=read_groups(module, "g_idx"),
            scale_part="scales",
        )

    def _bits_of(self, module: Module) -> int:
        rows, inputs = module.entry("qweight").shape[:1], module.shape[1]
        for bits in (self._bits, *WIDTHS):
            if rows == (words_for(inputs, bits),) and inputs * bits % 32 == 0:
                return bits
        return self._bits  # and its shape is refused

    def _groups(self, module: Module) -> int:
        """How many groups there are: what the scales say if a tensor tells each input's, else the config."""
        shape = module.entry("scales").shape
        if "g_idx" in module.parts and len(shape) == 2 and 1 <= shape[0] <= module.shape[1]:
            return shape[0]
        inputs = module.shape[1]
        return group_count(inputs, _inputs_of_group(self._group_size, inputs))


class Awq:
    """``qweight [in, out / 8]`` and ``qzeros [groups, out / 8]`` in AWQ's order, ``scales [groups, out]``."""

    ignored: frozenset[str] = frozenset()

    def __init__(self, keys: Keys) -> None:
        bits = keys.integer("bits" if keys.has("bits") else "w_bit", high=32)
        if bits != 4:
            raise keys.wrong("bits", f"is {bits}, which is not supported; it must be 4")
        version = keys.text("version", "gemm").lower()
        if version != "gemm":
            raise keys.wrong("version", f"is {version!r}, which is not supported; it must be gemm")
        if not keys.flag("zero_point", True):
            raise keys.wrong("zero_point", "is false, which is not supported; it must be true")
        self._group_size = _group_size(keys, "group_size" if keys.has("group_size") else "q_group_size")

    def check(self, module: Module) -> tuple[str, ...]:
        if "qweight" not in module.parts:
            return ()
        out, inputs = module.shape
        if out % 8:
            raise module.wrong("qweight", f"packs eight outputs to a word, but the layer has {out}")
        groups = group_count(inputs, _inputs_of_group(self._group_size, inputs))
        module.expect("qweight", ("I32",), (inputs, out // 8))
        module.expect("scales", FLOATS, (groups, out))
        module.expect("qzeros", ("I32",), (groups, out // 8))
        return ("qweight", "qzeros", "scales")

    def read(self, module: Module) -> QuantTensor:
        return assemble(
            module,
            unpack_awq(module.read("qweight")).T,
            module.read("scales").T,
            bits=4,
            zero=unpack_awq(module.read("qzeros")).T,
            group_size=_inputs_of_group(self._group_size, module.shape[1]),
            scale_part="scales",
        )


def _group_size(keys: Keys, key: str = "group_size") -> int:
    size = keys.integer(key, low=_WHOLE_ROW, high=_MAX_GROUP)
    if size == 0:
        raise keys.wrong(key, "is 0; it must be positive, or -1 for one scale an output")
    return size


def _inputs_of_group(group_size: int, inputs: int) -> int:
    return inputs if group_size == _WHOLE_ROW else group_size
