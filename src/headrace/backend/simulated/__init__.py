"""A backend without a network: its tokens are a hash of what its KV slots really hold."""
