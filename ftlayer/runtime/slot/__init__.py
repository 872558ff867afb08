"""The process that runs subtasks: mailbox loop, channels, the vertex's answers."""
