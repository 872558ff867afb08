"""``ftlayer demo``: a query or a topology over real text, killed in the middle, and a ledger of every line."""
