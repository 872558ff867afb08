"""``ftlayer demo``: a wrapped query over real text, killed in the middle, and a ledger of every line."""
