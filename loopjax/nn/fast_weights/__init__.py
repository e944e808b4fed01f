"""Layers that write fast weights: gated delta nets and Jet."""
