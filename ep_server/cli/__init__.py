"""The command line. Each command is a module here, or a package."""
