"""The real GGUF models: run by the float32 oracle, they know what they should."""

from __future__ import annotations

from pathlib import Path

from headrace.backend.torch import reference_logits
from headrace.model.architecture import RopeSpec
from headrace.model.quant_tensor import QuantTensor
from headrace.model.weights.gguf_checkpoint import GGUFCheckpoint


def next_token(checkpoint: GGUFCheckpoint, prompt: list[str]) -> str:
    """The most likely token after ``prompt``, all given as the vocabulary spells them."""
    tokens: list[str] = checkpoint.file.metadata["tokenizer.ggml.tokens"]
    logits = reference_logits(checkpoint, [tokens.index(token) for token in prompt])
    return tokens[int(logits[-1].argmax())]


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    arch = checkpoint.architecture
    assert (arch.family, arch.vocab_size, arch.hidden_size, len(arch.layers)) == ("llama", 49152, 576, 30)
    assert arch.layers[0].attention.rope == RopeSpec(100_000.0, 64)
    assert arch.tied_head
    assert next_token(checkpoint, ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]) == "ĠParis"


def test_gemma3(gemma3_path: Path) -> None:
    checkpoint = GGUFCheckpoint(gemma3_path)
    arch = checkpoint.architecture
    assert (arch.family, arch.vocab_size, arch.hidden_size, len(arch.layers)) == ("gemma3", 262_144, 640, 18)
    windows = [layer.attention.window for layer in arch.layers]
    assert windows == ([512] * 5 + [None]) * 3
    bases = [layer.attention.rope.base for layer in arch.layers if layer.attention.rope]
    assert bases == ([1e4] * 5 + [1e6]) * 3
    kinds = {t.bits for t in map(checkpoint.tensor, checkpoint.names()) if isinstance(t, QuantTensor)}
    assert kinds == {4, 5, 6, 8}
    assert next_token(checkpoint, ["<bos>", "Paris", "▁is", "▁the", "▁capital", "▁of"]) == "▁France"
