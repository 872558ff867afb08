"""Dead letters told to a program: a callback in the driver, and a stream that a query or a topology reads."""
