"""What a generation costs. This version has the table of hardware only."""
