"""Multi-hop questions over knowledge graphs (DiscoLoop, arXiv 2607.00341)."""
