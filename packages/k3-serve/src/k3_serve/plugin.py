"""What k3-serve declares to the registry: three commands; imports no torch and no FastAPI."""

from k3_core.cli.lazy import CommandRegistry
from k3_core.plugins import hookimpl


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The commands `k3 serve`, `k3 top` and `k3 chat`."""
    registry.add("serve", target="k3_serve.cli:serve", help="An OpenAI-compatible server.")
    registry.add("top", target="k3_serve.top:top", help="Load and cache of a running server.")
    registry.add("chat", target="k3_serve.cli:chat", help="Talk to a model in the terminal.")
