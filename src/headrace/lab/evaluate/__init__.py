"""How good is a model, and how much worse (or better) than another: scores, paired statistics, a gate."""
