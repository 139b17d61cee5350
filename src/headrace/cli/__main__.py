"""``python -m headrace.cli``: the headrace command without its script."""

from headrace.cli.main import main

main()
