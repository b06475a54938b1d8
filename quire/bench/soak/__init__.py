"""Long runs with faults and hostile clients, and the search for damage afterwards."""
