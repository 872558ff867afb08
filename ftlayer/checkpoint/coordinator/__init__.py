"""When checkpoints begin, complete, fail and are forgotten: rules without I/O, threads or a clock."""
