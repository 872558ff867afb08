"""What a topology would cost on more machines than there are: a model, with costs that are measured on this one."""
