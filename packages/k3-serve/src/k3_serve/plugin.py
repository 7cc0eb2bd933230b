"""What k3-serve declares to the registry: its commands; imports no torch and no FastAPI."""

from k3_core.cli.lazy import CommandRegistry
from k3_core.plugins import hookimpl


@hookimpl
def k3_add_commands(registry: CommandRegistry) -> None:
    """The commands `k3 serve`, `k3 top`, `k3 chat` and `k3 bench serve`."""
    registry.add("serve", target="k3_serve.cli:serve", help="An OpenAI-compatible server.")
    registry.add("top", target="k3_serve.top:top", help="Load and cache of a running server.")
    registry.add("chat", target="k3_serve.cli:chat", help="Talk to a model in the terminal.")
    registry.add("bench", target="k3_serve.bench.cli:app", help="Load on a server: bench serve.")
