"""What routers and other servers ask this server for: KV events, and prompts computed elsewhere."""
