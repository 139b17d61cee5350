"""Causes that one request shows already: the frontend, the network, a cold start."""

from __future__ import annotations

from headrace.lab.diagnose.finding import Finding, Findings, ms, users
from headrace.lab.diagnose.switches import Switch, proof, switch

_FRONTEND_SHARE, _FRONTEND_MS = 0.3, 20.0  # of TTFT, and at least
_NETWORK_SHARE, _NETWORK_MS = 0.3, 20.0
_COLD_TIMES, _COLD_MS = 5.0, 1000.0  # the first request against later ones


def frontend(f: Findings) -> Finding | None:
    """Tokenizer, chat template and HTTP take long before the engine sees a request."""
    split = f.gentle
    if split is None or split.share("frontend") < _FRONTEND_SHARE or split.frontend_ms < _FRONTEND_MS:
        return None
    evidence = [
        f"one user waits {ms(split.total_ms)} for the first token after {split.prompt_tokens:.0f} others; "
        f"network, queue and prefill explain {ms(split.total_ms - split.frontend_ms)} of it",
        f"{ms(split.frontend_ms)} ({split.share('frontend'):.0%}) pass before or after the engine",
    ]
    lv = f.top
    idle, loaded = f.m.network.answer_ms, lv.answer_ms if lv is not None else None
    if lv is not None and idle is not None and loaded is not None and loaded > 3 * idle + 10:
        evidence.append(
            f"a request that needs no engine ({f.m.network.path}) takes {ms(loaded)} under load, "
            f"{ms(idle)} without"
        )
    s = lv.server if lv is not None else None
    if lv is not None and s is not None and s.busy is not None and s.busy < 0.8:
        evidence.append(f"the engine is busy only {s.busy:.0%} of the time with {users(lv.users)}")
    said = next((g.server.frontend_time_mean_ms for g in f.m.gentle if g.server is not None), None)
    if said is not None:
        evidence.append(f"the server itself reports {ms(said)} for checking and tokenising a request")
    changed = switch("frontend", f.engine)
    left = split.total_ms - split.frontend_ms
    attempt = changed.text
    if changed.serve:
        attempt += " keeps the engine going meanwhile; then look at the model's tokenizer and chat template"
    return Finding(
        cause="frontend",
        title="A slow frontend: tokenizer, chat template or HTTP",
        confidence="high" if split.source == "server" else "medium",
        evidence=evidence,
        attempt=attempt,
        gain=f"up to {ms(split.frontend_ms)} of TTFT: {ms(split.total_ms)} → {ms(left)} with one user",
        factor=split.total_ms / max(left, 0.05 * split.total_ms),
        proof=_one_user(f, changed),
    )


def network(f: Findings) -> Finding | None:
    """The way to the server and back."""
    split = f.gentle
    if split is None or split.share("network") < _NETWORK_SHARE or split.network_ms < _NETWORK_MS:
        return None
    changed = switch("near", f.engine)
    net = f.m.network
    evidence = [f"{ms(split.network_ms)} of {ms(split.total_ms)} to the first token is one round trip"]
    if net.connect_ms is not None:
        evidence.append(f"a TCP handshake takes {ms(net.connect_ms)}")
    if net.answer_ms is not None:
        evidence.append(f"GET {net.path} on an open connection takes {ms(net.answer_ms)}")
    return Finding(
        cause="network",
        title="The network between client and server",
        confidence="high",
        evidence=evidence,
        attempt=changed.text,
        gain=f"TTFT {ms(split.total_ms)} → {ms(split.total_ms - split.network_ms)} with one user",
        factor=split.total_ms / max(split.total_ms - split.network_ms, 0.05 * split.total_ms),
        proof=_one_user(f, changed),
    )


def cold_start(f: Findings) -> Finding | None:
    """The first request far slower than later ones: something loads, compiles or wakes up."""
    first = f.m.first_answer_ms
    known = [g.ttft_ms or g.e2e_ms for g in f.m.gentle if not g.repeated]
    later = next((value for value in known if value is not None), None)
    if first is None or later is None or first < _COLD_TIMES * later or first - later < _COLD_MS:
        return None
    changed = switch("warm", f.engine)
    return Finding(
        cause="cold_start",
        title="A cold start: the first request is far slower than later ones",
        confidence="medium",
        evidence=[f"the first request took {ms(first)} to its first token, later short ones {ms(later)}"],
        attempt=changed.text,
        gain=f"{ms(first)} → {ms(later)} for the first request after a start or a pause",
        proof=_one_user(f, changed),
    )


def _one_user(f: Findings, changed: Switch) -> list[str]:
    lv = next(iter(f.m.levels), None)
    prompt = f.gentle.prompt_tokens if f.gentle is not None else None
    return proof(f.m, changed, 1, prompt, lv.output_tokens if lv is not None else None)
