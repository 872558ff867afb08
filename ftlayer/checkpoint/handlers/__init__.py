"""State machines that tell from barriers on channels when a task takes its snapshot. No I/O, no clock."""
