"""Reference implementations and fakes for tests."""
