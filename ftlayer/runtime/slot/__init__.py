"""The process that runs subtasks: its rules, its mailbox loop, channels and credit."""
