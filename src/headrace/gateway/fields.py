"""What the settings of the gateway are made of: strict models, and numbers and names within bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME)]


class Strict(BaseModel):
    """Settings that know no unknown fields and never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
