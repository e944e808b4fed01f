"""Text: tokenised and packed once, then accessed by position."""
