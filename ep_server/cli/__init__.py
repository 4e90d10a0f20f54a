"""The commands of `ep-server`, one per file: NAME and `command`, a function typer reads the flags from."""
