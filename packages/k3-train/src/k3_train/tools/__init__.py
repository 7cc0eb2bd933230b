"""Commands beside training: export a checkpoint, inspect a configuration, examine a machine."""
