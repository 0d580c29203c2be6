"""What torchguard costs: programs that measure it, and the records of what they found."""
