"""Fast-weight layers: Gated DeltaNet and Jet."""
