"""WHAT computes: cpu (records a native program), torch (oracle and GPU), simulated."""
