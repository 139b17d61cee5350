"""WHAT is run: architecture, the ops protocol, network definitions, weights, the model store."""
