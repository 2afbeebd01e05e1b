"""Mutation testing: small changes to the source, each of which some test should notice. See docs/testing.md."""
