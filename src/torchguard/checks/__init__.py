"""Values out of range raise, compiled or not: an index, a label, a divisor, a probability."""
