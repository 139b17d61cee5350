"""A backend without a network: its tokens are a hash of what its KV slots really hold."""

from headrace.backend.simulated.runner import Latency, SimulatedRunner, simulated_architecture

__all__ = ["Latency", "SimulatedRunner", "simulated_architecture"]
