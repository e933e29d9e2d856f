"""What a run shows of itself: the audited step, the page, what is written while it runs."""
