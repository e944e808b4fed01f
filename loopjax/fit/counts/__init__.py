"""What is counted in the text of a compiled program, which `hlo` parses."""
