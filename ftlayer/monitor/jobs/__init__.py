"""What drivers tell of their jobs: announcements to a board, orders that come back, and a board where there is none."""
