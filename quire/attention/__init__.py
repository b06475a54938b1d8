"""What attention needs to know about a step: who owns which token, and where its keys and values live."""
