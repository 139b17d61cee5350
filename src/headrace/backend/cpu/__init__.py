"""The cpu backend: records a definition into a native program and runs it."""
