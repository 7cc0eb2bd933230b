"""What the routes of one application share: the model and how it is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest

from k3_core.engine import Engine, Request
from k3_serve.api.errors import ApiError
from k3_serve.api.runs import Run
from k3_serve.grammar import Compiler
from k3_serve.observer import Observer, Silent
from k3_serve.ops.auth import tenant_of
from k3_serve.settings import Settings

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


@dataclass(frozen=True)
class Service:
    """One model under the name `model_id`."""

    engine: Engine
    tokenizer: K3Tokenizer
    model_id: str
    settings: Settings = field(default_factory=Settings)
    observer: Observer = field(default_factory=Silent)
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiler", Compiler(self.tokenizer))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for the name of another model; None is this one."""
        if name is not None and name != self.model_id:
            raise ApiError(
                404,
                f"model {name[:200]!r} does not exist; this server has {self.model_id!r}",
                param="model",
                code="model_not_found",
            )

    def run(self, requests: list[Request], param: str) -> Run:
        """Submits the requests; `param` is the field to blame when the engine refuses one."""
        return Run(self.engine, requests, param, self.observer)


def salt_of(request: HttpRequest) -> str:
    """What seeds the cache keys of a request: tenants never share a prefix."""
    return tenant_of(request.scope)
