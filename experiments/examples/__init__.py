"""Examples of inner tasks a person writes, run by the tests."""
