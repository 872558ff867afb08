"""The functions of a chain, run over Arrow batches: how they are made ready, called, paced and bisected."""
