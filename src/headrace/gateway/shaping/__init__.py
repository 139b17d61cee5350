"""What is made of a request before an upstream has it: prompts from templates, long documents in parts, equal
requests as one, and short texts together.
"""
