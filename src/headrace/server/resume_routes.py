"""``/v1/requests/{name}``: what clients come back for after a restart."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import HeadraceError, RequestNotFoundError
from headrace.server.positions import Positions
from headrace.server.resumed import Reading, ResumedAnswer, ResumedAnswers
from headrace.server.routes import respond
from headrace.server.sender import CREDENTIAL, sender_of
from headrace.server.state import ServerState
from headrace.web.http import EventStream, while_connected

LAST_EVENT = "last-event-id"
RESUMED = "x-headrace-resumed"


class ResumeRoutes:
    """Handlers over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def resume(self, http: Request, name: str) -> Response:
        """An answer that another process began: its stream from ``Last-Event-ID`` on, or whole."""
        frontend = self._state.frontend
        answers, found = self._find(http, name)
        plan = found.plan
        line: dict[str, Any] = http.scope["state"]["log"]
        line.update(generation_id=plan.id, stream=plan.stream)
        answer = plan.open(frontend)
        count = plan.n * plan.prompts
        text = http.headers.get(LAST_EVENT, "") if plan.stream else ""
        seen = Positions.parse(text, count) if text else Positions(found.begun)
        answer.begun, answer.over = bool(text) or any(found.begun), seen is None
        answer.positions = Positions([0] * count)
        answers.open(found)
        reading = Reading(found, seen, answer.skip, self._state)
        streaming = False
        try:
            work = respond(self._state, reading, answer, plan, line)
            response = await while_connected(http.receive, work)
            streaming = isinstance(response, EventStream)
        except HeadraceError as error:
            line["error"] = error.code
            self._state.note(error)
            raise
        finally:
            if not streaming:
                await reading.aclose()
        response.headers[RESUMED] = "exact" if found.exact else "best-effort"
        return response

    async def end(self, http: Request, name: str) -> Response:
        """End an answer that another process began, and forget it."""
        answers, found = self._find(http, name)
        await answers.end(found)
        return Response(status_code=204)

    def _find(self, http: Request, name: str) -> tuple[ResumedAnswers, ResumedAnswer]:
        settings = self._state.settings
        sender, _ = sender_of(http.headers, settings.gateway_credential, priority=None, timeout_s=None)
        answers = self._state.resumed
        if answers is None:
            raise RequestNotFoundError("this server keeps no requests: start it with --checkpoint-path")
        answers.start()
        # Names that clients choose can be guessed: they count where somebody has shown who he is.
        by_gateway = settings.gateway_credential is not None and CREDENTIAL in http.headers
        known = settings.api_key is not None or by_gateway
        return answers, answers.find(name, sender.tenant, by_request=known)
