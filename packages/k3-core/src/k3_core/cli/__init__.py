"""The command `k3`; its subcommands are imported when they are run."""
