"""Tiny checkpoints with a byte tokenizer, whole enough for the command line; and damaged copies of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.frontend.byte_model import TEMPLATE, byte_backend
from tests.model.tiny import CASES

TEXT = "The miller opened the gate, and the water came down the race to the wheel. " * 12


def make_model(folder: Path, *, noise: float = 0.0, chat: bool = False) -> Any:
    """A float checkpoint in ``folder``; its transformers model. ``noise``: relative, in every matrix."""
    folder.mkdir(exist_ok=True)
    model = CASES["llama3"](folder)
    if noise:
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "embed" not in name:
                    parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=draw)
        model.save_pretrained(folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"} | ({"chat_template": TEMPLATE} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model
