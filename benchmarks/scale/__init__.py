"""What scale costs."""
