"""TEXT: tokenizer, chat templates, detokenizer, stop strings; LLM."""
