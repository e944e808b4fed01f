"""Models that were saved: by runs, and in folders of the Hub."""
