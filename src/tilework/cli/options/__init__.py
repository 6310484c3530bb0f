"""The options of the commands with their help texts: those that several share, and those of commands with many."""
