"""Divergence of a compressed-tensors model whose inputs are rounded once a token, by transformers."""

from __future__ import annotations

from pathlib import Path

_WINDOW = 1024


def kl_per_token(model: Path, source: Path, tokens: int) -> float:
    """Mean KL, nats per token, of ``source`` to ``model`` on the text that ``headrace eval`` scores.

    Both in float32 by transformers, which leaves the rounding to the library compressed-tensors.
    """
    import torch
    import transformers

    from headrace.frontend.tokenizer import load_tokenizer
    from headrace.lab.evaluate.texts import SHAKESPEARE, load_text, tokenise

    ids = tokenise(load_text([SHAKESPEARE]), load_tokenizer(source), tokens)
    pair = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (source, model)
    ]
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(ids), _WINDOW):
            window = torch.tensor([ids[start : start + _WINDOW]])
            reference, ours = (one(input_ids=window).logits[0, :-1] for one in pair)
            for at in range(0, len(reference), 64):
                wanted = reference[at : at + 64].log_softmax(-1)
                found = ours[at : at + 64].log_softmax(-1)
                total += float((wanted.exp() * (wanted - found)).sum(dtype=torch.float64))
            count += len(reference)
    return total / count
