"""Share: what one step has to give, and how a sequence takes from it."""

from __future__ import annotations

from headrace.engine.sequence import Sequence


class Share:
    """What a step has left to give: tokens, and logit rows beyond one a sequence; and what it has given."""

    def __init__(self, budget: int, spare_rows: int) -> None:
        self.budget = budget
        self.spare_rows = spare_rows
        self.scheduled: list[Sequence] = []
        self.decode_tokens = 0  # and drafted ones
        self.prompt_tokens = 0
        self.context_tokens = 0.0  # before each of the prompt tokens, summed over them
        self.drafting_s = 0.0  # spent on drafts for the step

    def give_decodes(self, decodes: list[Sequence]) -> None:
        """Schedule sequences that lack only their last token, and its draft; there is room for all."""
        for seq in decodes:
            seq.num_scheduled = seq.num_logit_rows = count = 1 + seq.num_draft_tokens
            self.decode_tokens += count
        self.budget -= self.decode_tokens
        self.scheduled += decodes

    def give(self, seq: Sequence) -> None:
        """Schedule as many tokens as ``seq`` lacks, as far as there are tokens and rows."""
        lacking = seq.num_tokens - seq.num_computed_tokens
        count = min(lacking, self.budget)
        without = lacking - seq.num_draft_tokens - 1  # tokens before the first logit row
        if seq.prompt_logprobs is not None and seq.lacks_prompt_logprobs:
            without = max(0, len(seq.prompt_logprobs) - seq.num_computed_tokens)
            count = min(count, without + 1 + self.spare_rows)
            self.spare_rows -= max(0, count - without - 1)
        seq.num_scheduled = count
        seq.num_logit_rows = max(0, count - without)
        if count > 0:
            self.scheduled.append(seq)
            self.budget -= count
            self.prompt_tokens += count
            self.context_tokens += count * (seq.num_computed_tokens + (count - 1) / 2)
