"""The torch backend: executes a definition eagerly; the float32 oracle, and any torch device."""
