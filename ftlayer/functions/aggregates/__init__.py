"""Built-in aggregates: what there is, what each takes and gives, and how it runs over whole batches."""
