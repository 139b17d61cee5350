"""A measurement as one page that needs nothing beside it, and as a picture."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from headrace.lab.bench import table
from headrace.lab.bench.plots import picture
from headrace.lab.bench.result import Result


def write_report(result: Result, stem: Path) -> Path:
    """Write ``stem``.html and ``stem``.png; the page's path."""
    page = render(
        resources.files(__package__).joinpath("report.html.jinja").read_text("utf-8"),
        picture(result, "svg"),
        result=result,
        columns=table.columns(result),
        rows=table.rows(result),
        findings=table.findings(result),
        floor=table.floor_line(result),
        notes=[(stage.label, table.server_line(stage), table.client_line(stage)) for stage in result.stages],
        settings={name: value for name, value in result.settings.items() if value is not None},
    )
    path = stem.with_name(f"{stem.name}.html")
    path.write_text(page, "utf-8")
    stem.with_name(f"{stem.name}.png").write_bytes(picture(result, "png"))
    return path


def render(template: str, svg: bytes, **values: Any) -> str:
    """A page of the lab: ``template`` finds its ``style`` and the drawing ``plots`` beside ``values``."""
    from jinja2 import Environment
    from markupsafe import Markup

    drawing = svg.decode()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        style=Markup(resources.files(__package__).joinpath("page.css").read_text("utf-8")),
        plots=Markup(drawing[drawing.index("<svg") :]),  # our own drawing; its texts are paths
        **values,
    )
