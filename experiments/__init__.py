"""The product: one command that composes a configuration, says what it will cost, trains, and shows what happened."""
