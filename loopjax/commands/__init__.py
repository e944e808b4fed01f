"""What commands share: flags, listings, tables and documents."""
