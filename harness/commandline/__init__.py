"""The words of a command line until they are a checked configuration."""
