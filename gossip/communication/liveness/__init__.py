"""Who is absent: progress markers, the liveness of processes and peers, and the wait-for graph over them."""
