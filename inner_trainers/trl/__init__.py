"""One file per inner algorithm, each mapping a `Recipe` to a TRL trainer, and the session that runs it."""
