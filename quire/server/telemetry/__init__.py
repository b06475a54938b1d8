"""What the server reports about itself: log lines, Prometheus metrics, traces, event-loop lag."""
