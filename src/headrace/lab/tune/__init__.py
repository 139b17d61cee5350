"""tune: search the server's switches for the configuration that serves a workload best.

``switches`` says what can be switched, ``search`` chooses what to try next, ``trial`` measures one
configuration, ``confirm`` measures the winner against the defaults again, ``run`` does all of it in a folder.
"""
