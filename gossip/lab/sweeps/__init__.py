"""Many runs at once: which ones, where each is, and what all of them together show."""
