"""Tiny checkpoints with a byte tokenizer, whole enough for the command line; and damaged copies of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.frontend.byte_model import TEMPLATE, byte_backend
from tests.model.tiny import CASES

TEXT = "The miller opened the gate, and the water came down the race to the wheel. " * 12


def make_model(folder: Path, *, noise: float = 0.0, chat: bool = False, steps: int = 0) -> Any:
    """A float checkpoint in ``folder``; its transformers model. ``noise``: relative, in every matrix;
    ``steps`` of training on the text make it sure of what comes next, as real models are."""
    folder.mkdir(exist_ok=True)
    model = CASES["llama3"](folder)
    if noise:
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "embed" not in name:
                    parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=draw)
        model.save_pretrained(folder)
    if steps:
        _train(model, steps)
        model.save_pretrained(folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"} | ({"chat_template": TEMPLATE} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def _train(model: Any, steps: int) -> None:
    token_ids = torch.tensor([byte_backend().encode(TEXT).ids[:128]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        optimizer.step()
    model.eval()


def damage(good: Path, bad: Path, how: str) -> None:
    """A copy of a checkpoint with one layer's weights scaled, or a bit in one of a hundred flipped."""
    shutil.copytree(good, bad)
    tensors = load_file(good / "model.safetensors")
    for name, tensor in tensors.items():
        if how == "scaled" and ".layers.1.mlp.down_proj" in name:
            tensors[name] = tensor * 4
        if how == "flipped" and ".layers.0.self_attn.v_proj" in name:
            raw = tensor.contiguous().view(torch.int32).flatten()
            draw = torch.randperm(len(raw), generator=torch.Generator().manual_seed(3))
            raw[draw[: max(1, len(raw) // 100)]] ^= 1 << 25  # a bit of the exponent
            tensors[name] = raw.view(torch.float32).reshape(tensor.shape)
    assert any(
        not torch.equal(tensors[name], old) for name, old in load_file(good / "model.safetensors").items()
    )
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
