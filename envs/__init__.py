"""The Gymnasium environments, their action and observation contracts, the budget and the journal of rounds."""
