"""What HTTP servers have to give, as a source: Server-Sent Events, and JSON that is asked for again and again."""
