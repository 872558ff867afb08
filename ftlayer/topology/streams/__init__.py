"""The streams that a user puts operators behind: each method returns a new one."""
