"""Many servers behind one address: who gets which request, and what becomes of it when a server dies."""
