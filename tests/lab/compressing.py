"""Small models, texts and calibration files for tests of compression; and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.cli import main
from headrace.frontend.tokenizer_cache import convert_file
from headrace.model.checkpoint import as_float32
from headrace.model.weights import open_checkpoint
from headrace.model.weights.safetensors import hf_name
from tests.lab.small_models import TEXT, make_model

HELD_OUT = "Whoever came late to the mill had to wait for the stone, and the stone waited for nobody. " * 10


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Compress = Callable[..., Done]


def make_files(folder: Path) -> Path:
    """A folder with ``model`` (trained a little, with a template), ``text.txt`` and ``calibration.jsonl``."""
    make_model(folder / "model", chat=True, steps=30)
    (folder / "text.txt").write_text(HELD_OUT)
    lines = [
        {
            "messages": [
                {"role": "user", "content": TEXT[at : at + 60]},
                {"role": "assistant", "content": TEXT},
            ]
        }
        for at in range(0, 160, 10)
    ]
    (folder / "calibration.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def compressor(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Compress:
    """``headrace compress quantize MODEL … `` in this process, on the files of :func:`make_files`; or another
    ``command``."""

    def call(*arguments: str, model: str = "model", command: str = "quantize") -> Done:
        capsys.readouterr()
        common = ["--calibration", str(files / "calibration.jsonl"), "--text", str(files / "text.txt")]
        common += ["--sequence-length", "96", "--threads", "1"]
        arguments = ("headrace", "compress", command, str(files / model), *common, *arguments)
        monkeypatch.setattr("sys.argv", list(arguments))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call


def make_float_smollm2(folder: Path, source: Path, layers: int) -> None:
    """The first layers of SmolLM2 in bfloat16, with noise that takes their weights off the 4-bit grid."""
    checkpoint = open_checkpoint(source)
    described = checkpoint.architecture
    attention = described.layers[0].attention
    assert attention.rope is not None
    folder.mkdir()
    for name, content in convert_file(source).items():
        (folder / name).write_bytes(content)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": described.hidden_size,
        "intermediate_size": described.layers[0].feed_forward.width,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": described.vocab_size,
        "max_position_embeddings": described.max_positions,
        "rms_norm_eps": described.final_norm.eps,
        "rope_theta": attention.rope.base,
        "tie_word_embeddings": described.tied_head,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(7)
    tensors = {}
    for name in checkpoint.names():
        if name.startswith("layers.") and int(name.split(".")[1]) >= layers:
            continue
        tensor = torch.from_numpy(np.array(as_float32(checkpoint.tensor(name))))
        if tensor.ndim == 2 and name.startswith("layers."):
            tensor += 0.03 * tensor.std() * torch.randn(tensor.shape, generator=draw)
        tensors[f"model.{hf_name(name, False)}"] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
