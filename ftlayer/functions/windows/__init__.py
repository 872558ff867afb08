"""Windows of event time on keyed streams, as process functions: which there are, what they hold, when they are over."""
